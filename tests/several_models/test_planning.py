"""Plans of models, in this process and in another one."""

import asyncio

import pytest

from octavo.errors import ConfigError, OctavoError
from octavo.several_models import planning
from octavo.several_models.plan_process import plan
from octavo.several_models.planning import PlanRequest, plan_model
from tests.encoders import write_encoder

LIMIT, REQUESTS = 6 * 2**30, 2**20


def planned(**settings):
    settings = {"device": "cpu", "num_threads": 1} | settings
    return plan(PlanRequest("m", settings, LIMIT, REQUESTS))


@pytest.fixture
def encoder(tmp_path):
    return {"model": write_encoder(tmp_path / "encoder"), "load_format": "dummy"}


def test_the_least_cache_has_room_for_one_request_and_not_less():
    settings = {"model": "octavo/stories", "max_model_len": 500}
    needs = planned(**settings).needs
    assert needs.least < needs.wish
    assert planned(**settings, kv_cache_memory_bytes=needs.least).max_model_len == 500
    with pytest.raises(ConfigError, match="max_model_len"):
        planned(**settings, kv_cache_memory_bytes=needs.least - 1)


def test_a_fixed_cache_is_neither_smaller_nor_larger():
    for fixed in ({"kv_cache_memory_bytes": 2**24}, {"num_gpu_blocks_override": 50}):
        needs = planned(model="octavo/stories", max_model_len=64, **fixed).needs
        assert needs.least == needs.wish


def test_abilities(encoder):
    assert planned(model="octavo/stories").abilities == ["generate", "embed", "token_embed"]
    # No chat without a model's name may go to it.
    assert planned(model="octavo/spoken-words").abilities[:1] == ["transcribe"]
    found = planned(**encoder)
    assert found.abilities == ["embed", "token_embed"]
    assert found.max_model_len == 64
    assert found.needs.wish < 2**24  # an encoder caches no prefixes


def test_a_model_that_does_not_fit_alone():
    with pytest.raises(ConfigError, match="MiB may be used"):
        plan(PlanRequest("m", {"model": "octavo/stories", "device": "cpu"}, 2**20, REQUESTS))


def ask(settings):
    return asyncio.run(plan_model(PlanRequest("m", settings, LIMIT, REQUESTS)))


def test_a_process_plans(encoder):
    assert ask(encoder | {"device": "cpu"}).abilities == ["embed", "token_embed"]
    with pytest.raises(OctavoError, match="There is no folder /nowhere"):
        ask({"model": "/nowhere"})


def test_a_process_that_dies(monkeypatch):
    monkeypatch.setattr(planning.sys, "executable", "/bin/false")
    with pytest.raises(OctavoError, match="reads m ended with status 1"):
        ask({})
