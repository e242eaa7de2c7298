"""Tests the result that train.py reads after it has started several ranks."""

from types import SimpleNamespace

from fa_train import run_config
from fa_train.parallel import launch


def test_a_run_that_had_nothing_to_do_has_no_result(tmp_path, monkeypatch):
    hydra = SimpleNamespace(runtime=SimpleNamespace(output_dir=str(tmp_path)))
    monkeypatch.setattr(run_config, "HydraConfig", SimpleNamespace(get=lambda: hydra))
    monkeypatch.setattr(run_config, "in_sweep", lambda: False)
    monkeypatch.setattr(run_config, "sweep_group", lambda: None)
    monkeypatch.setattr(launch, "launch", lambda *arguments, **told: None)
    assert run_config.launch_ranks(2) == {}
    result = tmp_path / "result.json"
    result.write_text('{"tokens": 7}')
    assert run_config.launch_ranks(2) == {}, "an earlier run's"
    monkeypatch.setattr(launch, "launch", lambda *_, **told: result.write_text('{"tokens": 8}'))
    assert run_config.launch_ranks(2) == {"tokens": 8}
