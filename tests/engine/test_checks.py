"""Settings that do not go together, one row of the table each."""

import pytest

from octavo.config import EngineConfig
from octavo.engine import checks
from octavo.engine.checks import REQUIREMENTS, check_requirements
from octavo.errors import ConfigError
from octavo.platforms.cpu import CPUPlatform
from octavo.platforms.cuda import CUDAPlatform

TRITON = {"attention_backend": "triton"}
DRAFT = {"speculative_config": {"model": "octavo/stories-draft", "num_speculative_tokens": 2}}
STAGES = {"pipeline_parallel_size": 2}
CACHE = {"expert_cache": "1G", "weight_cache": "/tmp/packed"}
CONNECTOR = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
CASES = [
    (TRITON | {"enable_sleep_mode": True}, "enable_sleep_mode works with device=cpu"),
    (
        TRITON | DRAFT,
        "speculative_config: draft models, heads and MTP layers run only on",
    ),
    (TRITON | {"enable_prompt_embeds": True}, "enable_prompt_embeds: embeddings as prompts"),
    (TRITON | {"tensor_parallel_size": 2}, "tensor_parallel_size=2 needs device=cpu"),
    (TRITON | STAGES, "pipeline_parallel_size=2 needs device=cpu"),
    (STAGES | DRAFT, "pipeline_parallel_size=2 needs no draft model"),
    (STAGES | {"enable_prompt_embeds": True}, "pipeline_parallel_size=2 needs enable_prompt_emb"),
    (TRITON | CACHE, "expert_cache works on device=cpu only"),
    (CACHE | {"weight_cache": "off"}, "expert_cache keeps the experts in the weight_cache folder"),
    (CACHE | {"load_format": "dummy"}, "expert_cache needs the weights of a checkpoint"),
    (CACHE | {"kv_transfer_config": CONNECTOR}, "expert_cache is not supported with kv_transfer"),
    (
        {"kv_transfer_config": CONNECTOR, "enable_prefix_caching": False},
        "kv_transfer_config needs enable_prefix_caching",
    ),
    ({"data_parallel_size": 2}, "data_parallel_size=2 is not supported on device=cuda"),
]


def test_an_mtp_layer_is_like_a_draft_model():
    mtp = {"speculative_config": {"method": "mtp"}}
    for settings, message in ((TRITON, "MTP layers run only"), (STAGES, "heads or MTP layer")):
        with pytest.raises(ConfigError, match=message):
            check_requirements(EngineConfig.from_kwargs(**settings, **mtp), CPUPlatform())


@pytest.mark.parametrize(
    ("row", "case"), list(zip(REQUIREMENTS, CASES, strict=True)), ids=[case[1] for case in CASES]
)
def test_each_requirement(row, case, monkeypatch):
    settings, message = case
    platform = CUDAPlatform() if "cuda" in message.lower() else CPUPlatform()
    monkeypatch.setattr(checks, "REQUIREMENTS", [row])
    check_requirements(EngineConfig(), platform)
    with pytest.raises(ConfigError, match=message):
        check_requirements(EngineConfig.from_kwargs(**settings), platform)
