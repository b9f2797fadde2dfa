"""Records of the inputs of a process, in order, and their replay: the same core over the same inputs."""
