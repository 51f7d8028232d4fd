"""Faults to plant: name, folder, old, new and tests of each, as in `Fault` of planted_faults."""

from fault_tables import of_all_packages, of_execution, of_instruments, of_judgement, of_words

TABLES = (of_all_packages, of_judgement, of_instruments, of_execution, of_words)
ROWS = tuple(row for table in TABLES for row in table.ROWS)
