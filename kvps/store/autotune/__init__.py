"""Settings that a job chooses by trial before it begins: ``KVPS_AUTOTUNE=1``."""
