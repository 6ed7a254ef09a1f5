"""Every family of Transformers, one by one: see families.py for what is looked at.

The lists below are those of one version of Transformers. With another, a family that is new or
changed may be left out with its reason, but none may count wrongly, or no longer be reached.
"""

from pathlib import Path

import pytest
import torch
import transformers
from families import families, look
from tiny_models import SHARED
from transformers.models.sam2.modeling_sam2 import Sam2MaskDecoder

import ssmax.hf
from ssmax.hf.conversion import Conversion

SURVEYED = "5.23.0"
EXCEPTIONS = {
    "causal": {
        # Attention code of their own, or none.
        "refused": """big_bird bloom codegen cpmant falcon falcon_mamba git gpt_neo
            gpt_neox_japanese gptj mamba mamba2 megatron-bert mpt mvp openai-gpt prophetnet reformer
            rembert roformer rwkv trocr xglm xlm xlnet xlstm""",
        # Unconverted, these take the places of padded tokens for others than alone.
        "unpadded": """bart bigbird_pegasus blenderbot blenderbot-small deepseek_v4 marian mbart
            pegasus plbart whisper""",
        # Unconverted, a cache gives these other logits than one forward, by 0.07 to 0.3.
        "own gap": """camembert data2vec-text moshi roberta roberta-prelayernorm xlm-roberta
            xlm-roberta-xl xmod""",
        "not built": """blt gemma3n gemma4_assistant gemma4_unified_assistant musicgen
            musicgen_melody""",
    },
    "masked": {
        "refused": """big_bird convbert deberta deberta-v2 flaubert fnet funnel ibert longformer
            luke megatron-bert mpnet mra mvp nystromformer reformer rembert roformer squeezebert
            tapas xlm yoso""",
        "not built": "perceiver",
    },
    "seq2seq": {
        "refused": "fsmt led mvp prophetnet",
        "own gap": "encoder-decoder",
        "not built": """granite_speech granite_speech_plus nemo_speechlm vibevoice_asr
            voxtral_realtime""",
    },
    "image-text": {
        "refused": "blip git",
        "unpadded": "kosmos-2.5",
        "own gap": "dots3_note paligemma t5gemma2",
        "not built": """blip-2 diffusion_gemma ernie4_5_vl_moe fast_vlm florence2 gemma3n glm5_next
            granite4_vision idefics instructblip instructblipvideo kosmos-2 molmo2
            muse_spark nemotron_h_omni perception_lm pi0 pix2struct pp_formulanet
            qwen2_5_omni_thinker qwen3_omni_moe_thinker udop vision-encoder-decoder""",
    },
}
# One of each way of masking and routing; `make test-all` looks at all families.
FEW = """bert bloom cohere2 deepseek_v3 exaone4 gemma3_text gpt2 gpt_oss llama llama4_text llava
    mamba mistral modernbert opt perceiver qwen3_next t5"""


def test_the_survey_is_of_the_transformers_that_make_installs():
    pins = (Path(__file__).parents[3] / "constraints.txt").read_text().splitlines()
    assert f"transformers=={SURVEYED}" in pins


def expected(kind, family):
    for outcome, names in EXCEPTIONS[kind].items():
        if family in names.split():
            return outcome
    return "right"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "family"),
    [
        pytest.param(kind, family, marks=() if family in FEW.split() else pytest.mark.slow)
        for kind, family in families()
    ],
)
def test_family_counts_what_it_sees_and_generates_what_it_should(kind, family):
    found = look(kind, family)
    wanted = expected(kind, family)
    if transformers.__version__ == SURVEYED:
        assert found.outcome == wanted, str(found)
    else:
        assert found.outcome != "wrong", str(found)
        assert (found.outcome == "refused") <= (wanted == "refused"), str(found)
    if found.outcome == "refused":
        # Git's text does not route, its pictures do.
        reason = "has no attention layer for" if family == "git" else "has its own attention code"
        assert reason in found.detail
    if found.outcome == "not built":
        # Named above and asserted where it was surveyed; elsewhere a family may need other sizes.
        pytest.skip(found.detail)


@torch.no_grad()
def test_towers_are_looked_at_with_a_picture():
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "image_size": 8, "patch_size": 4}  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**tower),
        text_config=transformers.LlamaConfig(**SHARED),
        image_token_index=98,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ssmax.hf.convert(model, attention="all")
    assert ssmax.hf.verify(model).layers == 2
    tokens = torch.tensor([[1, 98, 98, 98, 98, 5, 6]])
    picture = {"input_ids": tokens, "pixel_values": torch.randn(1, 3, 8, 8)}
    # The last layer of the tower is run, but what is taken is the one before it.
    assert ssmax.hf.verify(model, picture).layers == 4
    with pytest.raises(ValueError, match="these inputs do not lead there"):
        ssmax.hf.verify(model, {"input_ids": tokens[:, :1]})


def test_a_family_that_counts_wrongly_is_found(monkeypatch):
    from ssmax.hf import hook

    real = hook.count_keys
    monkeypatch.setattr(hook, "count_keys", lambda *a, **_: torch.full_like(real(*a), 10))
    for kind, family in (("causal", "llama"), ("masked", "bert"), ("seq2seq", "t5")):
        assert look(kind, family).outcome == "wrong"


def test_layers_with_attention_of_their_own_are_named_where_all_were_asked_for():
    config = transformers.LongT5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
                             vocab_size=99, local_radius=3)  # fmt: skip
    model = transformers.LongT5ForConditionalGeneration(config)
    with pytest.warns(UserWarning, match=r"they keep softmax: LongT5LocalAttention \(encoder"):
        ssmax.hf.convert(model, layers="all", attention="all")
    assert all(name.startswith("decoder") for name in Conversion.of(model).layers)


def test_a_bias_that_hides_is_refused():
    config = transformers.SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[2, 2],
                           num_heads=[2, 4], window_size=4)  # fmt: skip
    with pytest.raises(ValueError, match="SwinAttention.* hides keys by a bias of -100"):
        ssmax.hf.convert(transformers.SwinModel(config))


def test_a_branch_that_passes_the_interface_by_is_refused():
    config = transformers.Sam2MaskDecoderConfig(hidden_size=32, mlp_dim=48, num_hidden_layers=1)
    with pytest.raises(ValueError, match="Sam2Attention.* falls back to SDPA where s"):
        ssmax.hf.convert(Sam2MaskDecoder(config))
