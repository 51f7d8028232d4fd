"""Two runs beside each other: settings, environment, results, and the first row that differs."""
