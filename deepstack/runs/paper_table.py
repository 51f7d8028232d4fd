"""The table of `compare` as a paper prints it: texts, the best in bold, a caption."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from deepstack.base.text import short_text, signed_text
from deepstack.runs.outcomes import outcome_words

LOSS_COLUMN, INTERVAL_COLUMN, GAP = "validation loss", "95 % interval", "difference"
NUMBER_COLUMNS = ("N", "n", "pairs")


class PaperTable(NamedTuple):
    """Rows of texts with a caption.

    bold: the cells of the least mean loss of each depth, by number of the row and column.
    """

    rows: list[dict[str, str]]
    bold: list[tuple[int, str]]
    caption: str


def paper_table(
    rows: Sequence[Mapping[str, Any]],
    against: str | None = None,
    best: Sequence[str] = (),
    several_tasks: Collection[str] = (),
) -> PaperTable:
    """Return rows of `comparison` for a paper.

    against, best: as in `compare`; the caption says what they mean.
    several_tasks: names of the studies whose losses are not compared; '' for rows without `study`.
    """
    texts = []
    for row in rows:
        cells = {"study": str(row["study"])} if "study" in row else {}
        cells |= {"setting": str(row["setting"]), "N": str(row["depth"])}
        cells |= {name: short_text(row[name]) for name in best if name in row}
        cells |= {
            "outcome": outcome_words(str(row["outcome"])),
            LOSS_COLUMN: nats_cell(row["val_loss"]),
        }
        if is_known(row["val_sd"]):
            cells[LOSS_COLUMN] += f" ± {row['val_sd']:.3f}"
        cells |= {
            INTERVAL_COLUMN: interval_cell(row["val_low"], row["val_high"]),
            "n": str(row["n"]),
        }
        if "difference" in row:
            cells |= {GAP: nats_cell(row["difference"]), "its interval": interval_cell(
                row["diff_low"], row["diff_high"]
            ), "pairs": str(row["pairs"])}  # fmt: skip
        texts.append(cells)
    bold = [(number, LOSS_COLUMN) for number in best_rows(rows, several_tasks)]
    sentences = [
        f"Final validation loss in nats: mean ± standard deviation over the n seeds that are done, "
        f"and the {INTERVAL_COLUMN} of the mean (Student's t)."
    ]
    if any("difference" in row for row in rows):
        sentences.append(
            f"Difference: from {against}, of runs alike in all else, seed by seed; mean and "
            f"{INTERVAL_COLUMN} (Student's t) over the pairs."
        )
    if best:
        sentences.append(
            f"The same losses choose the best {', '.join(best)} and are compared; no interval "
            "accounts for this choice."
        )
    if bold:
        sentences.append("Bold: lowest mean at each depth; it need not be significant.")
    return PaperTable(texts, bold, " ".join(sentences))


def best_rows(rows: Sequence[Mapping[str, Any]], several_tasks: Collection[str] = ()) -> list[int]:
    """Return the numbers of the rows of `comparison` with the least mean loss of their depth.

    A depth with one known loss has none.  several_tasks: as in `paper_table`.
    """
    numbers = []
    for number, row in enumerate(rows):
        alike = [one for one in rows if all(one.get(k) == row.get(k) for k in ("study", "depth"))]
        losses = [one["val_loss"] for one in alike if is_known(one["val_loss"])]
        if row.get("study", "") in several_tasks or len(losses) < 2:
            continue
        if row["val_loss"] == min(losses):
            numbers.append(number)
    return numbers


def is_known(value: float | None) -> bool:
    """Return whether a cell has a number."""
    return value is not None and value == value


def nats_cell(value: float | None, digits: int = 3) -> str:
    """Return a number of nats with so many decimals, or a dash."""
    return "–" if value is None or value != value else signed_text(value, digits)


def interval_cell(low: float | None, high: float | None, digits: int = 3) -> str:
    """Return the two ends of an interval with so many decimals, or a dash."""
    return f"{nats_cell(low, digits)} to {nats_cell(high, digits)}" if is_known(low) else "–"
