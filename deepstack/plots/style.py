"""The style of charts, given to matplotlib for the time of drawing only, and their axes."""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    ScalarFormatter,
)

from deepstack.base.errors import ConfigError
from deepstack.base.registry import unknown
from deepstack.plots.texts import drawn, typeset_power, untypeset

T = TypeVar("T")

COLUMN_WIDTH, PAGE_WIDTH = 3.3, 6.8  # widths of one and two columns of a paper, in inches

# Okabe and Ito's colours without the yellow, which white paper swallows, in the order in which
# neighbours differ most; lines and markers differ too, for grey prints.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MORE_COLOURS = (
    "#882255", "#999933", "#6A3D9A", "#8C510A", "#E31A1C", "#1B5E3A", "#9A9AE0",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "h", "<", ">", "p", "*", "d", "8")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (5, 1.4, 1.2, 1.4)))
# A scheme's place gives its colour, line and marker.  Each block has every colour once; studies
# compare the schemes of the first one most.
ORDER = (
    "deepnorm", "post_ln", "pre_ln", "rezero", "admin", "sub_ln", "sandwich_ln",
    "peri_ln", "fixup", "ds_init", "layer_scale", "hyper_connections", "skip_init", "ngpt",

    "t_fixup", "norm_former", "real_former", "res_post_norm", "hybrid_norm", "branch_norm",
    "residual", "deepnorm_rates", "keel", "depth_mup", "mix_ln", "b2t", "complete_p", "ln_scaling",

    "dense_former", "mhc", "x0_lambdas", "attn_res", "deepnorm_adam", "deepnorm_tight",
    "pre_ln_scaled", "dlcl", "res_former", "pro_res", "deepnorm_runtime_beta", "parallel", "gpas",
    "post_ln_init",

    "looped", "frac_connections", "laurel", "siamese_norm", "mv_split", "deepnorm_power",
    "deep_scale_lm", "orthogonal_update", "deep_delta", "parcae", "mudd",
)  # fmt: skip
DIVERGED_MARKER = "X"
GREY = "#555555"

# Any: some versions of matplotlib type the keys one by one.
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 7,
    "axes.labelsize": 7,
    "axes.titlesize": 7,
    "axes.titlelocation": "left",
    "axes.titlepad": 3,
    "axes.labelpad": 2,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.5,
    **{f"{axis}tick.labelsize": 6.5 for axis in "xy"},
    **{f"{axis}tick.{kind}.width": width for axis in "xy"
       for kind, width in (("major", 0.6), ("minor", 0.4))},
    **{f"{axis}tick.{kind}.size": size for axis in "xy"
       for kind, size in (("major", 2.5), ("minor", 1.5))},
    **{f"{axis}tick.major.pad": 2 for axis in "xy"},
    "lines.linewidth": 1.1,
    "lines.markersize": 3.8,
    "lines.markeredgewidth": 0.9,
    "legend.fontsize": 6.5,
    "legend.title_fontsize": 6.5,
    "legend.frameon": False,
    "legend.borderpad": 0.1,
    "legend.handlelength": 2.2,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.2,
    "legend.labelspacing": 0.35,
    # Hinted text is wider at one resolution than at another, and lines were measured at one.
    "text.hinting": "none",
    "mathtext.default": "regular",
    "savefig.dpi": 200,
    "svg.fonttype": "path",
    # Type 3, matplotlib's own choice, is refused where papers are handed in; 42 is TrueType.
    "pdf.fonttype": 42,
    # Without a salt the ids in an SVG are random, and a chart drawn twice differs.
    "svg.hashsalt": "deepstack",
}  # fmt: skip

WIDE = 12  # ratio of the ends of an axis of values from which it is logarithmic
LETTER = 0.62 * STYLE["ytick.labelsize"] / 72  # approximate inches of a letter of a tick label


@contextmanager
def deepstack_style(font: str | None = None, svg_text: bool = False) -> Iterator[None]:
    """Use deepstack's style inside; the user's own is restored afterwards.

    font: the name of an installed font instead of DejaVu Sans.
    svg_text: whether an SVG has its texts as text, not as outlines.

    Raises ConfigError for an unknown font.
    """
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        if font is not None:
            from matplotlib.font_manager import get_font_names

            if font not in get_font_names():
                raise ConfigError(unknown("font", font, sorted(get_font_names())))
            # Letters that a font lacks are taken from the second one.
            mpl.rcParams["font.family"] = [font, STYLE["font.family"]]
        if svg_text:
            mpl.rcParams["svg.fonttype"] = "none"
        yield


def scheme_style(name: str) -> dict[str, Any]:
    """Return colour, line and marker of a scheme, which depend on its name only.

    The schemes of ORDER differ from each other in colour and line, and in colour and marker.
    Another scheme has its place by a checksum, and a marker that ORDER does not use in its colour.
    """
    colours = COLOURS + MORE_COLOURS
    turns = len(DASHES)
    if name in ORDER:
        axis_number = ORDER.index(name)
    else:
        others = len(colours) * (len(MARKERS) - turns)
        axis_number = turns * len(colours) + zlib.crc32(name.encode()) % others
    turn, colour = divmod(axis_number, len(colours))
    return {
        "color": colours[colour],
        "linestyle": DASHES[(colour // len(COLOURS) + turn) % turns],
        "marker": MARKERS[(colour % len(COLOURS) + 3 * turn) % len(MARKERS)],
    }


def setting_style(style: dict[str, Any], index: int, count: int) -> dict[str, Any]:
    """Return the style of a scheme at value `index` of `count` of a second setting.

    The values are shades of the scheme's colour, from dark to light, with lines of their own.
    """
    if count < 2:
        return style
    red, green, blue = to_rgb(style["color"])
    shade = 2 * index / (count - 1) - 1  # -1: darkest, 0: the colour itself, 1: lightest
    end, part = (1.0, 0.5 * shade) if shade > 0 else (0.0, -0.35 * shade)
    red, green, blue = ((1 - part) * value + part * end for value in (red, green, blue))
    return style | {"color": to_hex((red, green, blue)), "linestyle": DASHES[index % len(DASHES)]}


def shade(index: int, count: int) -> Any:
    """Colour `index` of `count` in a sequence, dark to light, each readable on white."""
    fraction = index / (count - 1) if count > 1 else 0.0
    return mpl.colormaps["viridis"](0.88 * fraction)


def shades(values: Sequence[T]) -> dict[T, Any]:
    """Return a colour for each value: dark for the first, light for the last."""
    return {value: shade(i, len(values)) for i, value in enumerate(values)}


def log_axis(axes: Axes, which: str, low: float, high: float) -> None:
    """A log scale over [low, high] whose labels can be read: plain numbers where they are short.

    Under one and a half decades 1, 2, 3, 5 are labelled, up to two 1, 3, then powers of ten; the
    marks in between are drawn and not labelled.
    """
    axes.set(**{f"{which}scale": "log", f"{which}lim": (low, high)})
    decades = math.log10(high / low)
    digits = (1, 2, 3, 5) if decades <= 1.5 else (1, 3) if decades <= 2.2 else (1,)
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=digits, numticks=7))
    if sum(low <= tick <= high for tick in axis.get_majorticklocs()) < 2:
        axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: drawn(axis_number(value))))
    axis.set_minor_locator(LogLocator(subs=range(1, 10), numticks=7))
    axis.set_minor_formatter(NullFormatter())


def number_axis(axes: Axes, which: str, values: Sequence[float], log: bool) -> None:
    """Give an axis a logarithmic or linear scale around these values."""
    if log:
        log_axis(axes, which, *axis_limits(values))
        return
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.5
    axes.set(**{f"{which}scale": "linear", f"{which}lim": (low - margin, high + margin)})
    axis = axes.xaxis if which == "x" else axes.yaxis
    are_integers = all(float(value).is_integer() for value in values)
    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=are_integers))
    axis.set_major_formatter(ScalarFormatter(useOffset=False))
    axis.set_minor_locator(NullLocator())


def depth_axis(axes: Axes, depths: Sequence[int]) -> None:
    """A log axis of depth.  It labels the first and the last depth, and those that fit between."""
    tried_axis(axes, depths, str, "depth N (layers)")


def tried_axis(axes: Axes, values: Sequence[float], text: Callable[[Any], str], label: str) -> None:
    """A log axis with a tick at each value; labels the first, the last, and those that fit between.

    text: function that gives the label of a value.
    """
    every = sorted(set(values))
    low, high = every[0], every[-1]
    margin = (high / low) ** 0.05 if high > low else 1.2
    axes.set(xscale="log", xlim=(low / margin, high * margin), xlabel=label)
    grid = axes.get_subplotspec().get_gridspec()  # type: ignore[union-attr]
    inches = axes.figure.get_figwidth() / grid.ncols - 0.4  # type: ignore[union-attr]
    digit = LETTER * 1.1 * math.log(high / low) / inches
    sizes = {value: len(untypeset(text(value))) for value in every}
    labelled: list[float] = []
    for value in sorted(every, key=lambda n: (n not in (low, high), n)):
        # Half of each label, and a space between them.
        half = [digit * ((sizes[value] + sizes[n]) / 2 + 0.8) for n in labelled]
        if all(abs(math.log(value / n)) > h for n, h in zip(labelled, half, strict=True)):
            labelled.append(value)
    axes.set_xticks(labelled, [drawn(text(value)) for value in labelled])
    axes.xaxis.set_minor_locator(FixedLocator(every))
    axes.xaxis.set_minor_formatter(NullFormatter())


def step_axis(axes: Axes, first: int, last: int) -> None:
    """Steps: a log axis where the first ones matter, a plain one for a few."""
    number_axis(axes, "x", [first, last], log=first >= 1 and last >= 20)
    axes.set_xlabel("step t")


def layer_axis(axes: Axes, depth: int, which: str = "x", ticks: int = 5) -> None:
    """Label layers 1 to N with round numbers and both ends; at most about `ticks` labels."""
    rounded = MaxNLocator(ticks, steps=[1, 2, 5, 10], integer=True).tick_values(0, depth)
    margin = 0.6 * (rounded[1] - rounded[0])
    labelled = sorted({1, *(k for k in rounded if 1 < k < depth - margin), depth})
    ends = (1 - 0.02 * depth, max(depth * 1.02, 2)) if which == "x" else (0.5, depth + 0.5)
    axes.set(**{f"{which}lim": ends, f"{which}label": "layer l", f"{which}ticks": labelled})


def is_wide(values: Any) -> bool:
    """Return whether finite values are not negative, and the positive ones lie far apart."""
    finite = np.asarray(values)[np.isfinite(values)]
    positive = finite[finite > 0]
    return bool(len(positive) and (finite >= 0).all() and positive.max() > WIDE * positive.min())


def axis_number(value: float) -> str:
    """A tick label: a plain number where it is short, a power of ten where not."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.10g}"
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    digit = value / 10.0**exponent
    front = "" if abs(digit - 1) < 1e-9 else f"{digit:.3g}·"
    return front + typeset_power("10", exponent)


def axis_limits(values: Sequence[float], margin: float = 0.06) -> tuple[float, float]:
    """Limits of a log axis around positive values, with a margin on both sides."""
    positive = [value for value in values if value > 0 and math.isfinite(value)]
    low, high = (min(positive), max(positive)) if positive else (0.1, 1.0)
    if high / low < 1.5:
        low, high = low / 1.4, high * 1.4
    factor = (high / low) ** margin
    return low / factor, high * factor
