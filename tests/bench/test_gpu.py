"""`bench gpu` where there is no GPU."""

import pytest

from bench.gpu.__main__ import main


def test_without_a_gpu_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "error: " in capsys.readouterr().out
