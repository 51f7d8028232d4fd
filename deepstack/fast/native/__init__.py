"""Runs recorded operations of a CPU step by C++ kernels.

`cache` keeps the compiled kernels, `compiler` compiles and `library` loads them.  `translate` turns
recorded calls into records of a table, and `translations` has the records of each operation.
`split.h` says how an operation may be divided between threads, and `team.h` plans and runs a table
by several threads.
"""

from deepstack.fast.native import matrix_translations, translations
from deepstack.fast.native.cache import find_kernels
from deepstack.fast.native.library import Kernels
from deepstack.fast.native.translate import Translator

__all__ = ["Kernels", "Translator", "find_kernels", "matrix_translations", "translations"]
