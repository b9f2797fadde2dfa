"""Engines that start the processes of a job: on this machine, by ssh, by srun; kvps.platforms has more."""
