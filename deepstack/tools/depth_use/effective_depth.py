"""One number for the used depth of a stack, from the logit lens."""

import numpy as np
from numpy.typing import ArrayLike

THRESHOLD = 0.5


def effective_depth(kl: ArrayLike) -> int:
    """Return the least l with KL_l < THRESHOLD · max KL, l = 0..N.

    kl: (N + 1,), KL_l of the prediction that the head reads after l layers and the final one; its
    last value is 0, so that such an l exists.  N: the prediction takes shape in the last layer; 0:
    no layer is needed, or no KL is finite and above 0.

    This is the definition by the KL of the logit lens of Hu et al. 2025, 'What Affects the
    Effective Depth of Large Language Models?', arXiv:2512.14064.  The threshold is taken from the
    authors' notebook.  Their other two are not defined for every stack.  The cosine of layers and
    stream may never change its sign.  An overlap of the top 5 above 0.3 is met by chance in a
    vocabulary of fewer than 17 tokens.  Their ratio is (l + 1)/N; here it is l/N.
    """
    values = np.asarray(kl, dtype=float)
    maximum = np.nanmax(np.where(np.isfinite(values), values, np.nan), initial=0.0)
    if not maximum > 0:
        return 0
    return int(np.argmax(values < THRESHOLD * maximum))
