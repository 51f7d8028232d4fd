"""Runs recorded operations of a CPU step by C++ kernels.

`compiler` compiles and loads them, `translate` turns recorded calls into records of a table, and
`translations` has the records of each operation.
"""

from deepstack.fast.native import matrix_translations, translations
from deepstack.fast.native.compiler import Kernels, find_kernels
from deepstack.fast.native.translate import Translator

__all__ = ["Kernels", "Translator", "find_kernels", "matrix_translations", "translations"]
