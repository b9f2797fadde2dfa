"""Links: the connections of a process that are not libzmq's."""
