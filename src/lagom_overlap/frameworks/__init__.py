"""One TOML file per framework with all about it, each fact with its source; `workload.step.framework_file` reads it."""
