"""The audit by engines themselves, of which one drops a scale. `make engines` builds them."""

import json
import os

import pytest
import transformers
from small_llama import llama

from ssmax.audit import audit, write_small
from ssmax.export import export

ENGINES = os.environ.get("SSMAX_ENGINES")
pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(ENGINES is None, reason="needs engines; make test-engines installs them"),
]


def found(folder, name, home, **options):
    engines = [f"{name}={ENGINES}/{home}/bin/python"]
    (verdict,) = audit(folder, engines=engines, tokens=300, **options).verdicts
    return verdict


@pytest.fixture(scope="module")
def ministral3(tmp_path_factory):
    """A small one whose scale begins at position 64."""
    config = transformers.Ministral3Config()
    config.rope_parameters |= {"original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.5}
    home = tmp_path_factory.mktemp("ministral3")
    config.save_pretrained(home)
    return write_small(home, home / "small")


def test_mlx_lm_applies_the_scale_of_ministral_3(ministral3):
    verdict = found(ministral3, "mlx-lm", "mlx")
    assert verdict.finding == "applied", verdict


def test_vllm_reads_one_key_of_the_scale_and_not_the_other(ministral3):
    """Vllm-project/vllm issue 48621; where it is mended, docs/audit.md is to be written anew."""
    verdict = found(ministral3, "vllm", "vllm")
    assert (verdict.finding, verdict.version) == ("dropped", "0.32.0")
    path = ministral3 / "config.json"
    scaling = {"beta": 0.5, "original_max_position_embeddings": 64}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"llama_4_scaling": scaling}))
    verdict = found(ministral3, "vllm", "vllm")
    assert verdict.finding == "applied", verdict


def test_llama_cpp_applies_s(tmp_path):
    model = llama(max_position_embeddings=2048)
    model.save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "gguf", to="gguf")
    gguf = tmp_path / "gguf" / "model.gguf"
    verdict = found(tmp_path / "model", "llama.cpp", "llama-cpp", gguf=gguf)
    assert verdict.finding == "applied", verdict
