"""Other projects' trainers over a cluster: Lightning, Accelerate, Hugging Face. Each module needs its own package."""
