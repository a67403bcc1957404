"""The fits on tables of others: what they print where Ctrl-C ends them, and which rows they leave out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_contention_points import AMD
from test_contention_points import GOOD as PRODUCT
from test_iteration_time import VTRAIN
from test_training_steps import DENSE, HEADER

import fit_attention
import fit_contention
import fit_framework
import fit_mixtures
import fit_one_gpu
import fit_operators
import fit_steps

pytestmark = pytest.mark.long

OWN = Path(__file__).parents[2] / "benchmarks" / "results" / "h100_2026-11-22" / "surface.csv"
QWEN = DENSE.replace("LLAMA2-7B", "Qwen3_30B_a3B").replace(",1,1,1,,1,1,8,2048,", ",1,1,1,8,1,1,8,2048,")
TWELVE = "8,8,2,2048,16,12,1024,4,1,2,160.6027"


def write(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "table.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def ends_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, and Ctrl-C in place of its call of that number."""
    count = 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            raise KeyboardInterrupt
        return function(*arguments, **named)

    return counted


@pytest.mark.parametrize(
    ("call", "words"),
    [
        # One number (one sequence length) takes two prices of the one job a round, then one for the mean error.
        (1, ("so far, h100_dgx, 1 jobs, 0 of 3 rounds: sustained_share = ", "(the start)")),
        (3, ("so far, h100_dgx, 1 jobs, 1 of 3 rounds: sustained_share = ",)),
        (7, ("so far, h100_dgx, 1 jobs, 3 of 3 rounds: sustained_share = ",)),
    ],
)
def test_the_fit_of_steps_says_how_far_it_came(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    call: int,
    words: tuple[str, ...],
) -> None:
    monkeypatch.setattr(fit_steps, "predicted", ends_at(call, fit_steps.predicted))
    assert fit_steps.main([write(tmp_path, HEADER, DENSE)]) == 130
    out, err = capsys.readouterr()
    assert all(word in out for word in words)
    assert err == "fit_steps: interrupted before its end\n"


def test_a_fit_that_was_printed_is_not_lost_while_families_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two jobs: 12 prices in three rounds, 2 for the mean error; the next one is of the first family's fit.
    monkeypatch.setattr(fit_steps, "predicted", ends_at(15, fit_steps.predicted))
    table = write(tmp_path, HEADER, DENSE, DENSE.replace("LLAMA2-7B", "LLAMA2-13B"), DENSE.replace("H100", "TPUv4"))
    assert fit_steps.main([table]) == 130
    out, err = capsys.readouterr()
    assert "h100_dgx, 2 jobs: sustained_share" in out
    assert out.endswith("so far, no family left out\n")
    assert f"{table}:4: unknown GPU 'TPUv4'" in err


def test_the_fit_of_mixtures_fits_what_is_priced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write(tmp_path, HEADER, QWEN, QWEN.replace("H100", "B200"))
    assert fit_mixtures.main([write(tmp_path, HEADER, QWEN)]) == 0
    alone = capsys.readouterr().out.splitlines()[0]
    table = write(tmp_path, HEADER, QWEN, QWEN.replace("H100", "B200"))
    monkeypatch.setattr(fit_mixtures, "_priced", ends_at(2, fit_mixtures._priced))
    assert fit_mixtures.main([table]) == 130
    assert capsys.readouterr().out == f"so far, 1 of 2 jobs: {alone.removeprefix('1 jobs: ')}\n"
    monkeypatch.setattr(fit_mixtures, "_priced", ends_at(1, fit_mixtures._priced))
    assert fit_mixtures.main([table]) == 130
    assert capsys.readouterr().out == "so far, 0 of 2 jobs: nothing is known\n"


def test_the_fits_of_contention_print_the_best_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = write(tmp_path, AMD, PRODUCT)
    monkeypatch.setattr(fit_contention, "judged", ends_at(2, fit_contention.judged))
    assert fit_contention.main([table, "--draws", "3"]) == 130
    assert capsys.readouterr().out == "so far, 1 of 4 draws, best: the profile's own\n"
    header, *rows = OWN.read_text(encoding="utf-8").splitlines()
    monkeypatch.setattr(fit_one_gpu, "errors_of", ends_at(3, fit_one_gpu.errors_of))
    assert fit_one_gpu.main([write(tmp_path, header, *rows[:4])]) == 130
    assert capsys.readouterr().out.startswith("so far, 2 of 4 rows, norm and share: (")


def test_the_fit_of_a_framework_prints_its_best_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_framework, "predict", ends_at(2, fit_framework.predict))
    assert fit_framework.main([write(tmp_path, VTRAIN, TWELVE)]) == 130
    assert capsys.readouterr().out.startswith("so far, megatron_deepspeed, 1 rows: launch_s in us = 60, ")


def test_a_wrong_row_does_not_end_a_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, *rows = OWN.read_text(encoding="utf-8").splitlines()
    table = write(tmp_path, header, rows[0].replace("H100-SXM5-80GB", "H1"), *rows[1:3])
    assert fit_one_gpu.main([table]) == 0
    out, err = capsys.readouterr()
    assert "of 2 rows" in out
    assert err.startswith(f"{table}:2: unknown GPU 'H1'")


def test_the_fit_of_operators_prints_its_least_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    header = "n_head,n_kv_head,n_embd,n_expanded_embd,use_gated_mlp,num_tokens,num_tensor_parallel_workers"
    table = write(
        tmp_path,
        f"{header},time_stats.mlp_down_proj.median",
        "32,32,2560,10240,False,4096,1,0.8",
        "32,32,2560,10240,False,4096,1,1e-3",  # 2 x 4096 x 2560 x 10240 in a microsecond
        "32,32,2560,10240,False,4096,3,0.8",
    )
    monkeypatch.setattr(fit_operators, "times", ends_at(3, fit_operators.times))
    assert fit_operators.main([table, "--gpu", "A100"]) == 130
    out, err = capsys.readouterr()
    assert out.startswith("so far, loss ")
    assert "tile_flops=" in out
    assert f"{table}:3: time_stats.mlp_down_proj.median says 1e-06 s, impossible" in err
    assert f"{table}:4: num_tensor_parallel_workers is 3, must divide n_embd (2560)" in err


def test_the_law_of_attention_is_found_again_in_its_own_times() -> None:
    points = {length: 500e12 / (1 + 800 / length) for length in (512, 2048, 8192)}
    found = fit_attention.fit(points)
    assert (found.flops, found.half) == (pytest.approx(500e12), pytest.approx(800))
    assert max(map(abs, found.errors_pct)) < 1e-6


def test_the_fit_of_attention_names_wrong_rows_and_judges_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"H100,flash_attention_2,both,{length},{rate}" for length, rate in ((512, 163), (2048, 265), (16384, 328))]
    table = write(tmp_path, "gpu,kernel,pass,seq,tflops", *rows, "H100,cudnn,sideways,512,1", "H100,cudnn,both,512,300")
    assert fit_attention.main([table]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("H100, flash_attention_2, both: flops = 3.3")
    assert "H100, cudnn, both: 1 lengths, 3 are needed" in out
    assert f"{table}:5: pass is 'sideways'; known: forward, backward, both" in err
