"""The ground floor: errors, registries, options, plugins, YAML, the ends of processes."""
