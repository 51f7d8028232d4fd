"""Faults to plant: name, folder, old, new and tests of each, as in `Fault` of planted_faults."""

from fault_tables import of_all_packages, of_execution, of_instruments, of_judgement

ROWS = (*of_all_packages.ROWS, *of_judgement.ROWS, *of_instruments.ROWS, *of_execution.ROWS)
