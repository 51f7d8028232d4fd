"""Outside systems, one folder each: clusters, trackers, tokenizers, model libraries.

The core finds them by the names of their files (`deepstack.base.extensions`).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what the folders' PUBLIC adds to `import deepstack`, for type checkers
    from deepstack.integrations.huggingface.analysis import (
        analyze_huggingface as analyze_huggingface,
    )
