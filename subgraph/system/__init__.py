"""Operating system and machine: trusted files, forks, memory pages, processors; registries."""
