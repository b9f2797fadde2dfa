"""Manifests that run a job on other platforms: a description of the job in, text for the platform out."""
