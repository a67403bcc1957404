"""One TOML file per GPU with all about it, each number with its source and date; `hardware.gpu_file` reads it."""
