"""The table of a study: settings by depths, or by learning rates."""

from deepstack.runs.outcomes import Result
from deepstack.runs.result_table import result_table


def end(
    depth: int, seed: int, loss: float | None, rate: float = 1e-3, state: str = "done"
) -> Result:
    return Result("DeepNorm", "DeepNorm", depth, rate, seed, state, loss, 3.2)


def test_a_cell_has_mean_deviation_number_and_what_ended_otherwise() -> None:
    results = [end(6, 0, 2.70), end(6, 1, 2.74), end(6, 2, 4.0, state="diverged"), end(48, 0, 2.5)]
    (row,) = result_table(results, {results[0]: 1.0, results[1]: 2.0})
    assert row == {
        "validation loss": "DeepNorm",
        "N = 6": ["2.720 ± 0.028, n 2", "‖ΔF‖ 1.5", "1 diverged"],
        "N = 48": ["2.500, n 1"],
    }


def test_a_study_over_rates_has_a_column_for_each() -> None:
    results = [end(n, 0, 2.0 + n / 100, rate) for n in (6, 48) for rate in (2e-3, 1e-3)][:-1]
    first, second = result_table(results)
    assert list(first) == ["validation loss", "N", "lr 0.001", "lr 0.002"]
    assert first["N"] == 6 and first["lr 0.001"] == ["2.060, n 1"]
    assert second["lr 0.001"] is None and second["lr 0.002"] == ["2.480, n 1"]
    (only,) = result_table(results[:2])
    assert "N" not in only
