"""Engines that start the processes of a job: this machine, ssh, Slurm, Kubernetes."""
