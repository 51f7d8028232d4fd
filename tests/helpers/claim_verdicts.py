"""The expected verdict of every claim."""

from __future__ import annotations

VERDICTS = {
    "C1": "holds",
    "C2": "holds",
    "C3": "holds in part",  # equality of magnitude fails for independent rows
    "C4": "holds",
    "C5": "holds",
    "C6": "holds",
    "C7": "holds in part",  # a gradient step is aligned with x and the weights
    "C8": "holds in part",  # so that the sum is no bound for one
    "C9": "holds in part",  # where the formula says nearly 1
    "C10": "holds",
    "C11": "holds",
    "C12": "holds as a bound",
    "C13": "holds in part",  # the factor of Post-LN's own form stays below 1
    "C14": "holds",
    "C15": "does not hold",  # the listing is another model
    "C16": "holds",
    "C17": "holds",
    "C18": "holds in part",
    "C19": "holds in part",
    "C20": "holds",
    "C21": "holds",
    "C22": "holds",
    "C23": "holds",
    "C24": "holds",
    "C25": "holds in part",
    "C26": "holds",
    "C27": "holds",
    "C28": "holds",
    "C29": "holds in part",
    "C30": "holds",
    "C31": "holds in part",
    "C32": "holds",
    "C33": "holds",
    "C34": "holds",
    "C35": "holds",
    "C36": "holds in part",
    "C37": "holds in part",  # a gradient step is aligned, as in C7
    "C38": "holds in part",  # not for independent tokens
    "C39": "holds in part",  # the spectral norm grows as √d
    "C40": "holds in part",  # which power is best depends on the rate
    "C41": "holds as a bound",
    "C42": "holds as a bound",
    "C43": "holds in part",  # LN gives all words the same length
    "C44": "holds in part",  # Post-LN needs none either, and does not end lower
    "C45": "holds as a bound",
    "C46": "holds as a bound",
    "C47": "holds in part",  # both fine-tune to the same loss
    "C48": "holds in part",  # for small x
}

# claim that holds in part -> beginnings of the stated parts that do not agree
DISAGREEING: dict[str, tuple[str, ...]] = {
    "C18": ("‖W⁻¹x − Wᵀx‖", "‖WᵀW − I‖_F/‖I‖_F"),
    "C19": ("the same, beside 1/√768",),
    "C25": ("largest |eigenvalue| over ‖W‖₂, square",),
    "C29": ("β_LN, self-attention, 0.82", "β_LN, cross-attention, 0.82",
            "β_LN, feed-forward, 0.82", "β_RC, self-attention, 1.1",
            "β_RC, cross-attention, 1.1", "β, cross-attention", "δ_r by autograd",
            "ln(‖δ‖ first/last)"),
    "C31": ("nats below the unigram, merged over separate, steps 11",),
    "C36": ("‖∂s/∂logits‖ without", "‖∂s/∂q‖ without", "the same, d_head"),
    "C37": ("the last, v = w = 0.5, a gradient step on 1 ", "the last, v = w = 0.5, a gradient"),
    "C38": tuple(f"‖Attn‖ at gain {g} over that at gain 1, ind" for g in ("0.1", "0.38", 2, 4)),
    "C39": ("‖∂f/∂θ‖₂ over",),
    "C40": ("p = 0: loss less that at ¼, lr 0.1",),
    "C43": ("LN: slope of log", "LN: share of pairs"),
    "C44": ("Post-LN, 12 layers: the same", "the same, the last 20 steps"),
    "C47": ("second chain: loss of Post-LN",),
    "C48": ("E[x²] over that before, tanh as it is",) * 2,
}  # fmt: skip
