"""Records of what a process was given, in order, and their replay: the same core over the same inputs."""
