"""Hugging Face's models on flash.attention: beside Transformers' own eager attention, in the simulator."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers", minversion="5.17")

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    CompileConfig,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    LlamaConfig,
    ModernBertConfig,
    ModernBertModel,
    T5Config,
    T5EncoderModel,
)
from transformers.masking_utils import (  # noqa: E402
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

import flash  # noqa: E402
import flash_ladder.transformers as ladder  # noqa: E402

VOCABULARY, N, PADDED = 61, 21, 6
SHARED = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "initializer_range": 0.3,
          "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LAYERS = ["sliding_attention", "full_attention"]
CONFIGS = {  # initializer_range: so large that a query looks at few keys, and not at all alike
    "gpt2": lambda: GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64,
                               initializer_range=0.3, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
                               pad_token_id=0, bos_token_id=1, eos_token_id=None),
    "llama": lambda: LlamaConfig(**SHARED),
    "gemma2": lambda: Gemma2Config(**SHARED, sliding_window=8, attn_logit_softcapping=5.0,
                                   query_pre_attn_scalar=16, layer_types=LAYERS),
    "gpt_oss": lambda: GptOssConfig(**SHARED, sliding_window=8, num_local_experts=2, num_experts_per_tok=2,
                                    layer_types=LAYERS, rope_parameters=ROPE),  # no router, which jumps
}


def model_of(name: str, **changes):
    torch.manual_seed(1)
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def tokens(batch: int = 2, length: int = N) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(2))


def padding(kind: str, length: int = N) -> torch.Tensor | None:
    """(2, N), of which the second sequence is shorter; holes: of which some tokens are left out; ragged: both
    sequences are shorter, and one has a hole."""
    if kind == "none":
        return None
    there = torch.ones(2, length, dtype=torch.long)
    at = {"left": slice(0, PADDED), "right": slice(length - PADDED, length), "holes": slice(3, 9, 2),
          "ones": slice(0, 0), "ragged": slice(0, 1)}
    there[1, at[kind]] = 0
    if kind == "ragged":
        there[0, 0] = there[0, length // 2] = there[1, :3] = 0
    return there


def logits(model, implementation: str, ids, **arguments) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(ids, **arguments).logits


def agree(found, expected, real=None, tolerance: float = 1e-4) -> None:
    """Of real tokens, within the tolerance of the greatest number."""
    if real is not None:
        found, expected = found[real.bool()], expected[real.bool()]
    assert not found.isnan().any()
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= tolerance, f"{error:.2e}"


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name):
    """fp32: within 1e-4 of eager's, relative to the greatest; and the padding does matter."""
    model, ids = model_of(name), tokens()
    for kind in ("none", "left", "right", "holes", "ones"):
        there = padding(kind)
        expected = logits(model, "eager", ids, attention_mask=there)
        agree(logits(model, "ladder", ids, attention_mask=there), expected, there)
        if kind in ("left", "holes"):
            assert (expected - logits(model, "eager", ids))[1, PADDED:].abs().max() > 1e-2


@pytest.mark.parametrize("name", CONFIGS)
def test_generate(name):
    """Greedy tokens are eager's, left-padded and not; of windows, too, once they are full."""
    model, ids = model_of(name), tokens(length=7)
    for cache in ("dynamic", "static"):
        for kind in ("none", "left", "right"):
            there, found = padding(kind, 7), []
            if kind == "right":
                there[1, 1:4], there[1, 4:] = 0, 1        # the prompt has a hole, and so has each step
            for implementation in ("eager", "ladder"):
                model.set_attn_implementation(implementation)
                found.append(model.generate(ids, attention_mask=there, max_new_tokens=5, do_sample=False,
                                            cache_implementation=cache, output_logits=True,
                                            return_dict_in_generate=True))
            assert torch.equal(found[0].sequences, found[1].sequences), (cache, kind)
            agree(torch.stack(found[1].logits), torch.stack(found[0].logits))


def test_a_cache_is_continued():
    """Several queries behind keys that are there, in a static cache that has room for more."""
    from transformers import StaticCache

    model, ids, found = model_of("gemma2"), tokens(), []
    for implementation in ("eager", "ladder"):
        cache = StaticCache(config=model.config, max_cache_len=32)
        logits(model, implementation, ids[:, :5], past_key_values=cache)
        found += [logits(model, implementation, ids[:, 5:12], past_key_values=cache),
                  logits(model, implementation, ids[:, 12:13], past_key_values=cache)]
    agree(found[2], found[0])
    agree(found[3], found[1])


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_bf16(name):
    """The error is at most twice eager's own, against the same weights in float32."""
    ids, there = tokens(), padding("left")
    model = model_of(name).bfloat16()
    found = [logits(model, name, ids, attention_mask=there) for name in ("eager", "ladder")]
    exact = logits(model.float(), "eager", ids, attention_mask=there)
    eagers, ours = ((x.float() - exact)[there.bool()].norm() for x in found)
    assert 0 < ours <= 2 * eagers


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gpt_oss"])
def test_gradients(name):
    """Of all parameters, sinks included, in a padded batch."""
    model, ids, there = model_of(name).train(), tokens(), padding("right")
    labels = ids.masked_fill(there == 0, -100)
    found = []
    for implementation in ("eager", "ladder"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(ids, attention_mask=there, labels=labels).loss.backward()
        found.append({name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert any("sinks" in name for name in found[0]) == (name == "gpt_oss")
    for key, expected in found[0].items():
        if expected.abs().max() > 1e-6:
            agree(found[1][key], expected)


def test_dropout_in_training():
    model, ids = model_of("llama", attention_dropout=0.5), tokens()
    whole = logits(model, "ladder", ids)
    model.train()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(logits(model, "ladder", ids))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2], atol=1e-2)
    assert not torch.allclose(found[0], whole, atol=1e-2)


def test_packed_sequences():
    """Positions that begin again begin another sequence."""
    model, ids = model_of("llama"), tokens()
    at = torch.cat([torch.arange(8), torch.arange(N - 8)]).expand(2, -1)
    model.set_attn_implementation("ladder")
    found = logits(model, "ladder", ids, position_ids=at, use_cache=False)
    agree(found, logits(model, "eager", ids, position_ids=at, use_cache=False))
    agree(found[:, 8:], logits(model, "eager", ids[:, 8:]))


def test_masks_of_four_dimensions():
    model, ids = model_of("gpt2"), tokens()
    seen = (torch.rand(2, 1, N, N, generator=torch.Generator().manual_seed(3)) > 0.4) | torch.eye(N).bool()
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = logits(model, "eager", ids, attention_mask=bias)
    agree(logits(model, "ladder", ids, attention_mask=bias), expected)
    agree(logits(model, "ladder", ids, attention_mask=seen), expected)


@pytest.mark.parametrize("cls, config", [
    (BertModel, BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
                           initializer_range=0.3, attention_probs_dropout_prob=0.0)),
    (ModernBertModel, ModernBertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                                       intermediate_size=48, initializer_range=0.3, local_attention=8,
                                       global_attn_every_n_layers=2)),
    (T5EncoderModel, T5Config(d_model=32, d_kv=16, num_heads=2, num_layers=2, d_ff=48, dropout_rate=0.0))],
    ids=["bert", "modernbert", "t5"])
def test_keys_on_both_sides(cls, config):
    """Of encoders: with all keys, with a window, with a bias by distance, which has a gradient."""
    torch.manual_seed(1)
    model = cls._from_config(config, attn_implementation="eager").eval()
    ids, there, found = tokens(), padding("left"), []
    for implementation in ("eager", "ladder"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        states = model(ids, attention_mask=there).last_hidden_state[there.bool()]
        (states * torch.linspace(-1, 1, 32)).sum().backward()
        bias = {name: x.grad.clone() for name, x in model.named_parameters() if "relative" in name}
        found.append({"states": states.detach(), **bias})
    assert len(found[0]) == 1 + (cls is T5EncoderModel)
    for key, expected in found[0].items():
        agree(found[1][key], expected)


def test_an_encoder_beside_a_decoder():
    """GPT-2 that looks at an encoder's output, padding in that."""
    torch.manual_seed(1)
    there, ids = padding("left"), tokens()
    config = CONFIGS["gpt2"]()
    config.add_cross_attention = True
    decoder = GPT2LMHeadModel._from_config(config, attn_implementation="eager").eval()
    encoded = {"encoder_hidden_states": torch.randn(2, N, 32), "encoder_attention_mask": there}
    agree(logits(decoder, "ladder", ids[:, :9], **encoded), logits(decoder, "eager", ids[:, :9], **encoded))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", ["none", "right"])
def test_compiled(name, kind):
    """No graph break; the loss and a gradient are those of eager mode."""
    torch._dynamo.reset()
    model, ids, there = model_of(name).train(), tokens(), padding(kind)
    model.loss_type = "ForCausalLM"  # which GPT-2 does not say, and a warning is no part of a graph
    labels = ids if there is None else ids.masked_fill(there == 0, -100)
    found = []
    for implementation in ("eager", "ladder"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        run = compiled if implementation == "ladder" else model
        loss = run(ids, attention_mask=there, labels=labels, use_cache=False).loss
        loss.backward()
        found.append((loss.detach(), next(model.parameters()).grad.clone()))
    for ours, eagers in zip(found[1], found[0], strict=True):
        agree(ours, eagers)


LENGTH, MINE = 32, {"sliding_window": 5, "attention_chunk_size": None}
KINDS = {"causal": {}, "both": {"allow_is_bidirectional_skip": True, "allow_is_causal_skip": False,
                                "mask_function": bidirectional_mask_function},
         "window": {"local_size": 5, "mask_function": sliding_window_causal_mask_function(5)},
         "window_both": {"local_size": 5, "allow_is_bidirectional_skip": True, "allow_is_causal_skip": False,
                         "mask_function": sliding_window_bidirectional_mask_function(5)},
         "chunks": {"local_size": 5,
                    "mask_function": chunked_causal_mask_function(5, torch.zeros(2, dtype=torch.long))},
         "own": {"use_vmap": True, "allow_is_causal_skip": False,
                 "mask_function": lambda b, h, q, k: (k <= q) | (k == q + 3)}}
CALLS = {"plain": (LENGTH, LENGTH, 0, 0), "more keys": (9, LENGTH, LENGTH - 9, 0),
         "static, empty": (9, LENGTH, torch.tensor(0), 0), "static, begun": (9, LENGTH, torch.tensor(11), 0),
         "one, static": (1, LENGTH, torch.tensor(11), 0), "one": (1, LENGTH, LENGTH - 1, 0),
         "one, static window": (1, 5, 2, 0), "window's cache": (4, 8, 20, 16),
         "one, window's": (1, 5, 20, 16)}


@pytest.mark.parametrize("kind, call", [(kind, call) for kind in KINDS for call in CALLS
                                        if call == "plain" or not kind.endswith("both")])  # no caches there
def test_which_keys_are_seen(kind, call):
    """Those that Transformers' mask function says, of queries that are no padding: a key's value is a column
    of its own, so o says who is seen."""
    N_q, N_k, q_offset, kv_offset = CALLS[call]
    chunk = 5 if kind == "chunks" else None
    module = torch.nn.Module()
    module.is_causal = not kind.endswith("both")
    module.config = SimpleNamespace(**MINE | {"attention_chunk_size": chunk})
    arguments = dict(batch_size=2, q_length=N_q, kv_length=N_k, q_offset=q_offset, kv_offset=kv_offset)
    q, k = torch.randn(2, 1, N_q, LENGTH), torch.randn(2, 1, N_k, LENGTH)
    v = torch.eye(N_k).expand(2, 1, -1, -1)
    v = torch.nn.functional.pad(v, (0, -N_k % 8))
    for there in (None, "left", "right", "holes", "ragged"):
        end = int(q_offset) + N_q
        given = None if there is None else padding(there, end)
        if there == "right" and N_q == 1:
            given[1, -1] = 1
        if given is not None:
            given = given.bool()
        mask = ladder.make_mask(**arguments, **KINDS[kind], attention_mask=given, config=module.config)
        expected = sdpa_mask(**arguments, attention_mask=given, allow_is_causal_skip=False,
                             mask_function=KINDS[kind].get("mask_function", causal_mask_function),
                             use_vmap=kind == "own")[:, 0]
        o = ladder.attend(module, q, k, v, mask)[0][:, :, 0, :N_k]
        real = torch.ones(2, N_q).bool() if given is None else given[:, -N_q:]
        assert torch.equal((o > 0)[real], expected[real]), there


@pytest.mark.slow
def test_compiled_decoding():
    """As generate() compiles it for a static cache: no graph break, and nothing is compiled anew a token."""
    model, ids = model_of("llama"), tokens(length=7)
    how = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    how._compile_all_devices = True
    for kind in ("none", "left"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        found = []
        for implementation, options in (("eager", {}), ("ladder", {"compile_config": how})):
            model.set_attn_implementation(implementation)
            found.append(model.generate(ids, attention_mask=padding(kind, 7), max_new_tokens=6,
                                        do_sample=False, cache_implementation="static", **options))
        assert torch.equal(*found)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_nothing_is_read_back_in_a_decoding_step():
    """A fake tensor has no data: to look into it is an error."""
    with FakeTensorMode():
        offset, there = torch.tensor(9), torch.ones(2, 10, dtype=torch.bool)
        for given in (None, there):
            for window in (None, 4):
                mask = ladder.make_mask(2, 1, 32, q_offset=offset, attention_mask=given, local_size=window)
                assert mask.shape[:2] == (2, 1) and mask.shape[3] == 32
    assert ladder.make_mask(2, 1, 10, q_offset=9) is None


def test_forms_of_a_mask():
    """The structure is kept where it is known; a dense mask is the last resort."""
    def made(length=8, **arguments):
        mask = ladder.make_mask(2, length, **{"kv_length": 8, **arguments})
        return mask if mask is None else (mask.dtype, tuple(mask.shape))

    left, holes = (padding(kind, 8).bool() for kind in ("left", "holes"))
    ranges = (torch.int32, (2, 1, 2, 8))
    assert made() is None and made(attention_mask=torch.ones(2, 8).bool()) is None
    assert made(attention_mask=left) == ranges
    assert made(attention_mask=holes) == (torch.int32, (2, 1, 1, 8))
    assert made(3, kv_length=32, q_offset=torch.tensor(5)) == ranges
    assert made(4, q_offset=20, kv_offset=16) is None and made(1, q_offset=20, kv_offset=13) is None
    assert made(local_size=4) == (torch.int32, (2, 1, 3, 8)) and made(local_size=8) is None
    assert made(use_vmap=True, allow_is_causal_skip=False,
                mask_function=lambda b, h, q, k: k <= q + 1) == (torch.bool, (2, 1, 8, 8))
    assert torch.equal(ladder.make_mask(2, 1, 8, q_offset=7, attention_mask=left),
                       sdpa_mask(2, 1, 8, q_offset=7, attention_mask=left))


def test_stages_by_name():
    ladder.register("ladder_mma", stage="mma", backward="mma")
    ladder.register("ladder_of_2", stage="flash2", Br=16, Bc=32)
    model, ids = model_of("gpt2"), tokens()
    agree(logits(model, "ladder_of_2", ids), logits(model, "eager", ids))
    with pytest.raises(ValueError, match="mma"):                          # it takes no float32
        logits(model, "ladder_mma", ids)
    with pytest.raises(ValueError, match="'flash' is in it"):
        ladder.register("flash_ladder")


def test_what_is_refused():
    q = torch.randn(1, 2, 8, 16)
    module = torch.nn.Module()
    for arguments, message in (({"output_attentions": True}, "eager"), ({"cache": object()}, "generate")):
        with pytest.raises(ValueError, match=message):
            ladder.attend(module, q, q, q, None, **arguments)
    for mask in (torch.ones(1, 8), "causal"):
        with pytest.raises(ValueError, match=r"attention_mask: .*N_q, N_k"):
            ladder.attend(module, q, q, q, mask)
    with pytest.raises(ValueError, match="multiple of 8"):
        ladder.attend(module, q[..., :12], q[..., :12], q[..., :12], None)


def test_without_transformers():
    code = "import sys; sys.modules['transformers'] = None; import flash_ladder.transformers"
    done = subprocess.run([sys.executable, "-c", code], cwd=flash.ROOT, capture_output=True, text=True)
    assert done.returncode and "ImportError" in done.stderr and "pip install" in done.stderr
