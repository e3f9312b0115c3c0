"""Models of transformers in regions: one compile for each kind of layer, with losses and all gradients of eager."""

import warnings

import pytest
import torch

from glue_compiler.backend import GlueBackend
from glue_compiler.report.session import Session
from tests.models import training
from tests.models.training import Training, packed, tiny, with_lora
from tests.passes.chunk_loss.exact_models import in_fp64

transformers = pytest.importorskip("transformers")

DEEPSEEK = {
    "head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "experts_implementation": "eager",
}
SETTINGS = {
    "deepseek_v3": DEEPSEEK,
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
}


def in_regions(model, **settings):
    how = {"regions": "auto", "compiler": "aot_eager", **settings}
    return Training(model, lambda model, given: torch.compile(model, **{**given, "options": how}))


def model_of(family, count=4, checkpointed=False, **settings):
    if family not in training.MODELS:
        settings = {**SETTINGS.get(family, {}), **settings}
        transformers.AutoConfig.for_model(family)  # not in this release: an error here
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(training.MODELS, family, {})
            model = tiny(family, num_hidden_layers=count, **settings)
    else:
        model = tiny(family, num_hidden_layers=count, **{**SETTINGS.get(family, {}), **settings})
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def regions(trained):
    return [graph.region for graph in trained.session.graphs if graph.region]


def counts(trained, name):
    return [p.counts for graph in trained.session.graphs for p in graph.passes if p.name == name and p.changed]


@pytest.mark.parametrize(
    ("family", "checkpointed", "adapted"),
    [
        pytest.param("qwen3", True, True, marks=pytest.mark.slow),
        pytest.param("llama", False, True, marks=pytest.mark.slow),
        pytest.param("gemma3_text", True, False, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", True, False, marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_eager(family, checkpointed, adapted):
    model = model_of(family, 5 if family == "deepseek_v3" else 4, checkpointed)
    if adapted:
        model = with_lora(model)
        if checkpointed:
            model.enable_input_require_grads()
    trained = in_regions(model)
    trained.train([packed((20, 12))])
    # The first layer's input asks for no gradient where all before it is frozen. Each of gemma's two masks has its own.
    kinds = 2 if family == "gemma3_text" or (adapted and not checkpointed) else 1
    assert len(regions(trained)) == kinds
    assert sum(c["losses"] for c in counts(trained, "chunk_loss")) == 1
    # The first layer of deepseek differs, and is no region.
    attentions = kinds + (family == "deepseek_v3")
    assert sum(c.get("packed", 0) for c in counts(trained, "specialize_attention")) == attentions
    assert not trained.caught


@pytest.mark.slow
def test_masks_are_known_where_the_model_makes_them_and_read_where_the_caller_does():
    trained = in_regions(model_of("qwen3", 4, True))
    batch = packed((20, 12))
    ids = (batch["position_ids"] == 0).cumsum(1)
    token = torch.arange(ids.shape[1])
    own = (ids[:, :, None] == ids[:, None])[:, None] & (token[:, None] >= token)
    for given, form in ((batch, "packed"), ({**batch, "attention_mask": own}, "listed")):
        before = len(trained.session.graphs)
        trained.train([given])
        found = [p.counts for graph in trained.session.graphs[before:] for p in graph.passes if graph.region]
        assert [form in each for each in found if "nodes_erased" in each] == [True]
    before = len(trained.session.graphs)
    trained.train([batch, {**batch, "attention_mask": own}, batch])
    assert len(trained.session.graphs) == before


def step_of(model, call, batch):
    model.zero_grad(set_to_none=True)
    loss = call(**batch).loss
    loss.backward()
    return {"": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def qwen2_5_vl():
    text = {**training.COMMON, "num_hidden_layers": 4, "vocab_size": 80}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    vision = {"depth": 4, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1, 3]}
    tokens = {"image_token_id": 70, "video_token_id": 71, "vision_start_token_id": 72, "vision_end_token_id": 73}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope, "rope_scaling": rope}, vision_config=vision, **tokens
    )
    ids = torch.randint(3, 60, (1, 20))
    ids[0, 3:7] = 70
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    grid = torch.tensor([[1, 4, 4]])
    batch |= {"pixel_values": torch.randn(16, 3 * 2 * 16).double(), "image_grid_thw": grid}
    batch["mm_token_type_ids"] = (ids == 70).long()
    return transformers.Qwen2_5_VLForConditionalGeneration(config), batch


@pytest.mark.slow
@pytest.mark.parametrize(("build", "kinds"), [(qwen2_5_vl, 2)])
def test_encoders_beside_decoders(build, kinds):
    torch.manual_seed(0)
    model, batch = build()
    model = model.double().train()
    if hasattr(model, "loss_function"):
        model.loss_function = in_fp64("transformers.loss.loss_utils").ForCausalLMLoss
    session = Session()
    options = {"regions": "auto", "compiler": "aot_eager"}
    expected = {name: None if v is None else v.clone() for name, v in step_of(model, model, batch).items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = torch.compile(model, backend=GlueBackend(session=session), options=options)
        actual = step_of(model, call, batch)
    for name, want in expected.items():
        assert (actual[name] is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(actual[name], want, rtol=1e-8, atol=1e-10, msg=name)
    assert len({graph.region for graph in session.graphs if graph.region}) == kinds
