"""Traces on the fake engine: what each line records, and that its values are those of the program written by hand."""

# ruff: noqa: PT012  a trace is a block, and its error comes at the block's end
from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
import torch

import patchclamp as pc

EIFFEL, COLOSSEUM = "The Eiffel Tower is in", "The Colosseum is in"
D, T = 16, 6  # width of the fake model, tokens of `EIFFEL`


@pytest.fixture
def v():
    return torch.from_numpy(np.random.default_rng(0).standard_normal(D).astype(np.float32))


@pytest.fixture
def calls(lm, monkeypatch):
    """How many prompts each call of `lm.run` had, in order."""
    counts, run = [], type(lm).run
    monkeypatch.setattr(
        type(lm), "run", lambda self, prompt, **rest: counts.append(len(prompt)) or run(self, prompt, **rest)
    )
    return counts


def by_hand(lm, site, edits=(), prompt=EIFFEL, max_tokens=1):
    """What a program, written without a trace, captures at a site at its end."""
    return torch.as_tensor(lm.run(prompt, max_tokens=max_tokens, edits=list(edits), capture=[site])[pc.site(site)])


class TestReading:
    def test_saved_values_are_those_of_a_run_in_the_shapes_that_are_said(self, lm):
        with lm.trace(EIFFEL) as t:
            saved = {
                "resid_post[1]": t.layers[1].output.save(), "resid_pre[1]": t.layers[1].input.save(),
                "resid_mid[2]": t.layers[2].mid.save(), "attn_in[0]": t.layers[0].attn.input.save(),
                "attn_out[0]": t.layers[0].self_attn.output.save(), "mlp_out[2]": t.layers[-1].mlp.output.save(),
                "z[1]": t.layers[1].attn.z.save(), "z[1, 1]": t.layers[1].attn.z[1].save(),
                "q[1, 0:1]": t.q[1, 0:1].save(), "neurons[2, 3:9]": t.layers[2].mlp.neurons[3:9].save(),
                "embed": t.embed.save(), "final_norm": t.final_norm.save(), "k[0]": t.k[0].save(),
            }  # fmt: skip
        run = lm.run(EIFFEL, max_tokens=1, capture=list(saved))
        for site, tensor in saved.items():
            assert type(tensor) is torch.Tensor
            assert torch.equal(tensor, torch.as_tensor(run[site])), site
        assert saved["resid_post[1]"].shape == (T, D)
        assert saved["z[1, 1]"].shape == (T, 8)
        assert saved["q[1, 0:1]"].shape == (T, 1, 8)

    def test_nnterps_names_have_a_batch_axis_and_nothing_else_has(self, lm):
        with lm.trace(EIFFEL) as t:
            pairs = [
                (t.layers_output[1].save(), t.layers[1].output.save()),
                (t.layers_input[2].save(), t.layers[1].output.save()),
                (t.attentions_output[0].save(), t.attn_out[0].save()),
                (t.mlps_output[0].save(), t.mlp_out[0].save()),
                (t.token_embeddings.save(), t.embed.save()),
                (t.layers_output[1][:, -1].save(), t.layers[1].output[-1].save()),
            ]
            token, logits = t.layers_output[1][0, -1].save(), t.logits.save()
        for batched, plain in pairs:
            assert batched.shape == (1, *plain.shape)
            assert torch.equal(batched[0], plain)
        assert token.shape == (D,)
        assert logits.shape == (1, lm.model.d_vocab)

    def test_layers_output_is_the_next_ones_input(self, lm):
        with lm.trace(EIFFEL) as t:
            out = [layer.output.save() for layer in t.layers]
            into = [layer.input.save() for layer in t.layers]
        assert len(out) == lm.model.layers
        for before, after in zip(out[:-1], into[1:], strict=True):
            assert torch.equal(before, after)

    @pytest.mark.parametrize(
        ("key", "rows"),
        [(-1, 5), (2, 2), (slice(1, 4), [1, 2, 3]), ([4, 1], [4, 1]), (slice(None, None, 2), [0, 2, 4]),
         (pc.span("Eiffel Tower"), [2, 3]), ("prompt[-2]", [4]), (torch.tensor([0, 3]), [0, 3]), (np.int64(3), 3),
         (pc.prompt[0] | pc.prompt[2], [0, 2]), (slice(None), list(range(T)))],
    )  # fmt: skip
    def test_brackets_choose_tokens(self, lm, key, rows):
        with lm.trace(EIFFEL) as t:
            part, all_of_it = t.layers[1].output[key].save(), t.layers[1].output.save()
        assert torch.equal(part, all_of_it[rows])

    def test_brackets_of_heads(self, lm):
        with lm.trace(EIFFEL) as t:
            z = t.layers[1].attn.z
            parts = [z[1].save(), z[:, 1].save(), z[-1, 1].save(), z[:][2].save(), z[0:1][-1].save(),
                     z[pc.span("Tower")].save(), t.z[1][1:3, 0:1].save(), t.z[1, 0][-1].save()]  # fmt: skip
            whole = z.save()
        expected = [
            whole[:, 1],
            whole[:, 1],
            whole[-1, 1],
            whole[2],
            whole[-1, 0:1],
            whole[[3]],
            whole[1:3, 0:1],
            whole[-1, 0],
        ]
        for part, rows in zip(parts, expected, strict=True):
            assert torch.equal(part, rows)

    def test_numbers_of_numpy_and_torch_are_numbers(self, lm):
        with lm.trace(EIFFEL, max_tokens=3) as t:
            one, two, three = torch.tensor(1), np.int64(2), np.array(-1)
            parts = [
                t.layers[one].attn.z[one].save(),
                t.layers[two].output[two].save(),
                t.neurons[0, one][three].save(),
            ]
            t.generated[one].layers[2].output[:] = 0  # the columns of a row
            plain = [t.layers[1].attn.z[1].save(), t.layers[2].output[2].save(), t.neurons[0, 1][-1].save()]
            steps = t.generated.layers[2].output.save()
        assert all(map(torch.equal, parts, plain))
        assert parts[2].shape == ()
        assert not steps[1].any()
        assert steps[0].any()

    def test_tokens_that_are_generated(self, lm):
        with lm.trace(EIFFEL, max_tokens=4) as t:
            third, some = t.generated[2].layers[1].output.save(), t.generated[0:2].layers[1].output.save()
            every, later = t.all().layers[1].output.save(), t.generated.layers[1].output.save()
            logits, of_all = t.generated[1].logits.save(), t.all().logits.save()
            batched, chosen = t.generated[2].layers_output[1].save(), t.layers[1].output[pc.generated].save()
        assert every.shape == (T + 3, D)
        assert torch.equal(third, every[T + 2])
        assert torch.equal(batched, every[None, [T + 2]])
        assert torch.equal(some, every[T : T + 2])
        assert torch.equal(later, every[T:])
        assert torch.equal(chosen, every[T:])
        assert of_all.shape == (4, lm.model.d_vocab)
        assert torch.equal(logits, of_all[2])
        assert of_all.argmax(-1).tolist() == t.token_ids
        assert t.text == lm.run(EIFFEL, max_tokens=4).text

    def test_layers_and_steps_are_looped_over(self, lm):
        with lm.trace(EIFFEL, max_tokens=4, sampling={"ignore_eos": True}) as t:
            some = [layer.mlp.output.save() for layer in t.layers[1:3]]
            mlps = [mlp.output.save() for mlp in t.layers[-2:].mlp]
            table, heads = [h.save() for h in t.layers_output], [z[0].save() for z in t.z]
            steps, tokens = [step.layers[1].output.save() for step in t.generated], [p.embed.save() for p in t.prompt]
            counts = len(t.layers[1:3]), len(t.resid_post), len(t.generated), len(t.prompt)
            every, all_mlp = t.all().layers[1].output.save(), t.mlp_out[2].save()
            embed, z = t.embed.save(), t.z[2, 0].save()
            assert repr(t.layers).startswith("<the 3 layers")
        assert counts == (2, 3, 3, T)
        assert torch.equal(some[1], all_mlp)
        assert all(map(torch.equal, some, mlps))
        assert torch.equal(table[1][0], every[:T])
        assert torch.equal(heads[2], z)
        assert torch.equal(torch.stack(steps), every[T:])
        assert torch.equal(torch.stack(tokens), embed)
        assert len(table) == len(heads) == 3

    @pytest.mark.parametrize("how", ["plain", "inference", "no_grad"])
    def test_saved_values_are_ordinary_tensors(self, lm, how):
        mode = {"plain": contextlib.nullcontext, "inference": torch.inference_mode, "no_grad": torch.no_grad}[how]
        with mode(), lm.trace(EIFFEL) as t:
            h = t.layers[1].output.save()
        assert not h.is_inference()
        h.requires_grad_(True)
        (2 * h).sum().backward()
        assert torch.equal(h.grad, torch.full((T, D), 2.0))
        assert torch.equal(h.detach(), by_hand(lm, "resid_post[1]"))
        assert type(h) is torch.Tensor
        assert vars(h) == {}

    def test_a_cache_has_what_flows_on_after_all_writes(self, lm, v):
        with lm.trace(EIFFEL, max_tokens=3) as t:
            cache, tail = t.cache(pc.resid_post, "z[1]"), t.cache(pc.resid_post[0], tokens=pc.generated)
            t.all().layers[1].output.save()
            t.layers[0].output[2] += v
        assert list(cache) == ["resid_post[0]", "resid_post[1]", "resid_post[2]", "z[1]"]
        edit = pc.Add(v, pc.resid_post[0], tokens=pc.prompt[2])
        for site in cache:
            assert torch.equal(cache[site], by_hand(lm, site, [edit], max_tokens=3)[:T])
        assert cache[pc.resid_post[2]] is cache["resid_post[2]"]
        assert tail[pc.resid_post[0]].shape == (2, D)
        with pytest.raises(pc.MissingSource, match=r"resid_mid\[1\] is not in this cache"):
            cache[pc.resid_mid[1]]

    def test_a_cache_of_everything(self, lm):
        with lm.trace(EIFFEL, max_tokens=3) as t:
            cache = t.cache()
        assert {name.partition("[")[0] for name in cache} == set(lm.sites.names)
        assert cache["logits"].shape == (1, lm.model.d_vocab)
        assert cache["mlp_in[1]"].shape == (T, D)
        assert torch.equal(cache["layers_output[1]"], by_hand(lm, "resid_post[1]"))

    def test_a_chat_is_a_prompt(self, lm):
        chat = [{"role": "user", "content": "hello"}]
        with lm.trace(messages=chat) as t:
            h = t.layers[1].output.save()
        assert torch.equal(
            h, torch.as_tensor(lm.run(messages=chat, max_tokens=1, capture=["resid_post[1]"])["resid_post[1]"])
        )

    def test_saved_values_are_nobody_elses(self, lm):
        with lm.trace(EIFFEL) as t:
            first, again, cache = t.layers[1].output.save(), t.layers[1].output.save(), t.cache(pc.resid_post[1])
        kept = first.clone()
        again.zero_()
        cache["resid_post[1]"].zero_()
        lm.run(COLOSSEUM, max_tokens=3, capture=[pc.resid_post])
        assert torch.equal(first, kept)
        assert kept.any()

    def test_a_computed_value_is_saved(self, lm, v):
        with lm.trace(EIFFEL) as t:
            a, b = t.layers[1].output, t.layers[0].output
            sums = [
                (a - b).save(),
                ((2 * a + v) / 4 - 1).save(),
                (v - a[-1]).save(),
                (-a[-1] * v).save(),
                (v * b).save(),
            ]
            x, y = a.save(), b.save()
        for value, expected in zip(sums, [x - y, (2 * x + v) / 4 - 1, v - x[-1], -x[-1] * v, v * y], strict=True):
            torch.testing.assert_close(value, expected)

    def test_shapes_are_known_before(self, lm):
        with lm.trace(EIFFEL, max_tokens=3) as t:
            views = [t.layers[1].output, t.layers[1].output[-1], t.layers_output[1][:, 1:3], t.z[1], t.z[1, 0], t.neurons[0],
                     t.neurons[0, 3], t.logits, t.generated[1].embed]  # fmt: skip
            shapes, saved = [view.shape for view in views], [view.save() for view in views]
        assert shapes == [tuple(tensor.shape) for tensor in saved]


class TestWriting:
    @pytest.mark.parametrize(
        ("write", "ops"),
        [
            (lambda x, v: x.__setitem__(-1, v), [pc.Replace]),
            (lambda x, v: x.__setitem__(-1, 0), [pc.Zero]),
            (lambda x, v: x.__setitem__(-1, 2 * x[-1] + v), [pc.Scale, pc.Add]),
            (lambda x, v: x.__setitem__(-1, x[-1] - v), [pc.Add]),
            (lambda x, v: x.__setitem__(-1, (x[-1] + v) / 2), [pc.Scale, pc.Add]),
            (lambda x, v: x.__setitem__(-1, 1.5), [pc.Replace]),
            (lambda x, v: x[-1].__iadd__(4 * v), [pc.Add]),
            (lambda x, v: x[-1].__isub__(v), [pc.Add]),
            (lambda x, v: x[-1].__imul__(3), [pc.Scale]),
            (lambda x, v: x[-1].__itruediv__(2), [pc.Scale]),
            (lambda x, v: x[-1].__imul__((v > 0).float()), [pc.Replace]),
            (lambda x, v: x[-1].replace(v, alpha=0.5), [pc.Replace]),
            (lambda x, v: x[-1].add(v, 0.5, norm="match"), [pc.Add]),
            (lambda x, v: x[-1].ablate(v), [pc.Ablate]),
            (lambda x, v: x[-1].clamp_along(v, high=0.5), [pc.Clamp]),
            (lambda x, v: x[-1].rotate([v.numpy(), v.flip(0).numpy()], 30), [pc.Rotate]),
            (lambda x, v: x[-1].noise(0.5, seed=3), [pc.Noise]),
        ],
    )  # fmt: skip
    def test_arithmetic_becomes_ops_that_do_it(self, lm, v, write, ops):
        with lm.trace(EIFFEL) as t:
            before = t.layers[1].output.save()
            write(t.layers[1].output, v)
            after, logits = t.layers[1].output.save(), t.logits.save()
        edits = [op for op in t.run.program.edits if not isinstance(op, pc.Capture)]
        assert [type(op) for op in edits] == ops
        assert torch.equal(before, by_hand(lm, "resid_post[1]"))
        assert torch.equal(after[:-1], before[:-1])
        assert torch.equal(after, by_hand(lm, "resid_post[1]", edits))
        assert torch.equal(logits, by_hand(lm, "logits", edits))
        assert not torch.equal(after[-1], before[-1])

    def test_numbers_are_what_they_say(self, lm, v):
        with lm.trace(EIFFEL) as t:
            x = t.layers[1].output
            before = x.save()
            x[-1] = 2 * x[-1] + v
            x[0] = 3
            x[1:3] = torch.stack([v, -v])
            x[3] *= (v > 0).float()
            after = x.save()
        torch.testing.assert_close(after[-1], 2 * before[-1] + v)
        assert (after[0] == 3).all()
        assert torch.equal(after[1:3], torch.stack([v, -v]))
        assert torch.equal(after[3], before[3] * (v > 0))
        assert torch.equal(after[4], before[4])

    def test_a_read_sees_what_was_written_before_it_and_nothing_later(self, lm, v):
        with lm.trace(EIFFEL) as t:
            first = t.layers[1].output[-1].save()
            t.layers[1].output[-1] += v
            second = t.layers[1].output[-1].save()
            t.layers[1].output[-1] = 0
            third, next_input = t.layers[1].output[-1].save(), t.layers[2].input[-1].save()
        torch.testing.assert_close(second, first + v)
        assert first.any()
        assert not third.any()
        assert not next_input.any()

    def test_lines_are_in_order_at_a_place_and_places_in_depth(self, lm, v):
        """What layer 0 has acts on layer 1 wherever its line stands, also on what was saved or cloned there before."""
        with lm.trace(EIFFEL) as t:
            saved, copy = t.layers[1].output.save(), t.layers[1].output.clone()
            t.layers[0].output[2] += v
            t.layers[1].output = 0
            t.layers[1].output = copy
            restored, first = t.layers[1].output.save(), t.layers[0].output[2].save()
        edited = by_hand(lm, "resid_post[1]", [pc.Add(v, "resid_post[0]", tokens=pc.prompt[2])])
        assert torch.equal(saved, edited)
        assert torch.equal(restored, edited)
        assert not torch.equal(saved, by_hand(lm, "resid_post[1]"))
        torch.testing.assert_close(first, by_hand(lm, "resid_post[0]")[2] + v)

    def test_names_of_modules_are_assigned(self, lm, v):
        with lm.trace(EIFFEL) as t:
            t.layers[0].attn.output = 0
            t.layers[1].mlp.output += v
            t.resid_mid[2] = v
            t.embed *= 2
            t.layers_output[1][:, -1] = v[None]
            t.layers[1].attn.z[1] = 0
            t.layers[2].attn.z[:, 0] = torch.ones(8)
            t.mlps_output[2] = torch.stack([v] * T)[None]
        shown = [(type(op).__name__, f"{op.at} @ {op.tokens}") for op in t.run.program.edits]
        assert shown == [
            ("Zero", "attn_out[0] @ prompt"), ("Add", "mlp_out[1] @ prompt"), ("Replace", "resid_mid[2] @ prompt"),
            ("Scale", "embed @ prompt"), ("Replace", "resid_post[1] @ prompt[-1]"), ("Zero", "z[1, 1] @ prompt"),
            ("Replace", "z[2, 0] @ prompt"), ("Replace", "mlp_out[2] @ prompt"),
        ]  # fmt: skip

    def test_heads_of_a_token_are_written_and_others_stay(self, lm):
        z = torch.arange(16.0).reshape(2, 8)
        with lm.trace(EIFFEL) as t:
            before = t.layers[1].attn.z.save()
            t.layers[1].attn.z[-1, 0] = 0
            t.layers[1].attn.z[:][2] = z
            t.layers[2].mlp.neurons[3:5] = 0
            after, neurons = t.layers[1].attn.z.save(), t.layers[2].mlp.neurons.save()
        assert not after[-1, 0].any()
        assert torch.equal(after[-1, 1], before[-1, 1])
        assert torch.equal(after[2], z)
        assert torch.equal(after[[0, 1, 3, 4]], before[[0, 1, 3, 4]])
        assert not neurons[:, 3:5].any()
        assert neurons[:, :3].any()

    def test_several_layers_are_written_together(self, lm, v):
        with lm.trace(EIFFEL) as t:
            t.layers[0:2].output += v
        assert [str(op.at) for op in t.run.program.edits] == ["resid_post[0:2]"]

    def test_generated_tokens_are_steered_and_the_prompt_is_not(self, lm, v):
        with lm.trace(EIFFEL, max_tokens=4) as t:
            t.generated.layers[1].output += 8 * v
            t.generated[1].layers[0].mlp.output = 0
            h = t.all().layers[1].output.save()
        edits = [pc.Add(8 * v, pc.resid_post[1], tokens=pc.generated), pc.Zero(pc.mlp_out[0], tokens=pc.generated[1])]
        assert torch.equal(h, by_hand(lm, "resid_post[1]", edits, max_tokens=4))
        assert torch.equal(h[:T], by_hand(lm, "resid_post[1]"))

    def test_clone_and_replace(self, lm, v):
        with lm.trace(EIFFEL) as t:
            h = t.layers[1].output.clone()
            h[-1] = 0
            h[0] += v
            h *= 2
            t.layers[1].output = h
            after = t.layers[1].output.save()
            elsewhere = t.layers[1].output.clone()
            elsewhere[1] = v
            t.layers[2].output = elsewhere
            moved = t.layers[2].output.save()
        before = by_hand(lm, "resid_post[1]")
        expected = before.clone()
        expected[-1] = 0
        expected[0] += v
        torch.testing.assert_close(after, expected * 2)
        expected = after.clone()
        expected[1] = v
        torch.testing.assert_close(moved, expected)

    def test_a_clone_keeps_what_was_there(self, lm, v):
        with lm.trace(EIFFEL) as t:
            view, clone = t.layers[1].output[-1], t.layers[1].output[-1].clone()
            t.layers[1].output[-1] = v
            written, kept = view.save(), clone.save()
        assert torch.equal(written, v)
        assert torch.equal(kept, by_hand(lm, "resid_post[1]")[-1])

    def test_code_of_ones_own(self):
        with pc.LM("fake", allow_code=True) as lm:
            with lm.trace(EIFFEL) as t:
                t.layers[1].output[-1].apply(lambda h: h.clamp(-0.5, 0.5) if hasattr(h, "clamp") else h.clip(-0.5, 0.5))
                h = t.layers[1].output.save()
            assert h[-1].abs().max() == 0.5
            assert h[0].abs().max() > 0.5

    def test_what_code_raises_names_its_line(self):
        def wrong(h):
            raise ZeroDivisionError("of mine")

        with pc.LM("fake", allow_code=True) as lm:
            with pytest.raises(pc.RunError, match=r"(?s)ZeroDivisionError: of mine.*# its line"), lm.trace() as t:
                a, b = t.invoke(EIFFEL), t.invoke(COLOSSEUM)
                b.layers[0].output.save()
                b.layers[1].output[-1].apply(wrong)  # its line
                h = a.layers[1].output.save()
            assert torch.equal(h, by_hand(lm, "resid_post[1]"))


class TestWithinARun:
    def test_a_later_layer_is_written_with_an_earlier_ones_value(self, lm, calls):
        with lm.trace(EIFFEL, max_tokens=3) as t:
            early = t.layers[0].output.save()
            t.layers[2].output[-1] = t.layers[0].output[-1] * 2
            t.layers[1].output[1:3] += 0.5 * t.layers[0].output[3:5] - t.layers[0].mid[1:3]
            late, middle, mid = t.layers[2].output.save(), t.layers[1].output.save(), t.layers[0].mid.save()
        assert calls == [1, 1]
        assert torch.equal(late[-1], 2 * early[-1])
        assert torch.equal(early, by_hand(lm, "resid_post[0]"))
        torch.testing.assert_close(middle[1:3], by_hand(lm, "resid_post[1]")[1:3] + 0.5 * early[3:5] - mid[1:3])

    def test_an_earlier_layer_and_no_later_token_takes_one_run(self, lm, v, calls):
        """Written before and after, by a number, for several tokens and for one, and saved besides."""
        with lm.trace(EIFFEL, max_tokens=3) as t:
            x, y, z = (t.layers[i].output for i in range(3))
            x[1:] += v
            y[-2:] = x[2]
            z[-1] = y[-1] - 0.5 * x[0]
            x[1] *= 2
            saved = [x.save(), y.save(), z.save()]
        assert calls == [1]
        a, b, c = saved
        plain = by_hand(lm, "resid_post[0]")
        torch.testing.assert_close(a[1:], (plain[1:] + v) * torch.tensor([[2.0]] + [[1.0]] * (T - 2)))
        assert torch.equal(b[-2:], a[[2, 2]])
        torch.testing.assert_close(c[-1], b[-1] - 0.5 * plain[0])

    def test_every_generated_token_too(self, lm, calls):
        with lm.trace(EIFFEL, max_tokens=4) as t:
            t.all().layers[2].output += 0.1 * t.all().layers[0].output
            t.generated[1].layers[1].mlp.output = t.generated[0].layers[0].mlp.output
            early, late = t.all().layers[0].output.save(), t.all().layers[2].output.save()
            a, b = t.generated[0].layers[0].mlp.output.save(), t.generated[1].layers[1].mlp.output.save()
        assert calls == [1]
        edit = [pc.Add(pc.SameRun("resid_post[0]"), "resid_post[2]", pc.every, 0.1),
                pc.Replace(pc.SameRun("mlp_out[0]", pc.generated[0]), "mlp_out[1]", pc.generated[1])]  # fmt: skip
        run = lm.run(EIFFEL, max_tokens=4, edits=edit, capture=["resid_post[0]", "resid_post[2]"])
        assert len(early) == T + 3
        assert torch.equal(early, torch.as_tensor(run["resid_post[0]"]))
        assert torch.equal(late, torch.as_tensor(run["resid_post[2]"]))
        assert torch.equal(a, b)

    def test_a_value_that_depends_on_writes_has_them(self, lm, v, calls):
        """Three levels, of which a later position's needs a run: layer 0 is steered, layer 1 takes of it, layer 2 of that; generated tokens are edited, too."""
        with lm.trace(EIFFEL, max_tokens=4) as t:
            t.all().layers[0].output += v
            t.generated[1].layers[0].mlp.output = 0
            t.layers[1].output[-1] = t.layers[0].output[0]
            t.layers[2].mid[2] = 3 * t.layers[1].output[-1]
            a, b, c = t.layers[0].output.save(), t.layers[1].output.save(), t.layers[2].mid.save()
        assert calls == [1, 1]
        assert torch.equal(b[-1], a[0])
        assert torch.equal(c[2], 3 * b[-1])
        assert torch.equal(a, by_hand(lm, "resid_post[0]", [pc.Add(v, pc.resid_post[0])]))

    def test_swapping_two_tokens(self, lm):
        with lm.trace(EIFFEL) as t:
            x = t.layers[1].output
            before = x.save()
            first, last = x[0].clone(), x[-1].clone()
            x[0] = last
            x[-1] = first
            after = x.save()
        assert torch.equal(after[[0, -1]], before[[-1, 0]])
        assert torch.equal(after[1:-1], before[1:-1])

    def test_a_layer_is_skipped(self, lm):
        with lm.trace(EIFFEL) as t:
            t.layers[1].output = t.layers[1].input
            x, y = t.layers[0].output.save(), t.layers[1].output.save()
        assert torch.equal(x, y)

    def test_a_part_of_a_row_goes_where_as_wide_a_part_is(self, lm):
        """As an explicit program, the same head of a whole row is taken; in a trace, rows are as wide as said."""
        site, head = pc.z[1], pc.z[2, 1]
        run = lm.run(EIFFEL, max_tokens=1, edits=[pc.Replace(pc.SameRun(site), head)], capture=[site, head])
        assert torch.equal(torch.as_tensor(run[head]), torch.as_tensor(run[site])[:, 1])
        source = lm.run(EIFFEL, max_tokens=1, capture=[site, pc.resid_post[0]])
        again = lm.run(EIFFEL, max_tokens=1, edits=[pc.Replace(pc.From(source, site), head)], capture=[head])
        assert torch.equal(torch.as_tensor(again[head]), torch.as_tensor(source[site])[:, 1])
        for value in (pc.SameRun(pc.resid_post[0]), pc.From(source, pc.resid_post[0]), pc.SameRun(pc.q[1])):
            with pytest.raises(pc.ShapeError, match="different parts"):
                lm.run(EIFFEL, max_tokens=1, edits=[pc.Add(value, head)])
        for take in (lambda t: t.layers[0].output, lambda t: t.layers[1].attn.z, lambda t: 2 * t.layers[1].attn.z):
            with lm.trace(EIFFEL) as t:
                with pytest.raises(pc.ShapeError, match=r"z\[2, 1\] @ prompt has 8, .* has 16"):
                    t.layers[2].attn.z[1] = take(t)
                with pytest.raises(pc.ShapeError, match=r"has 8, .* has 16"):
                    t.layers[2].attn.z[1] += take(t)
                t.layers[2].attn.z[1] += t.layers[1].attn.z[0]
            assert len([op for op in t.run.program.edits if not isinstance(op, pc.Capture)]) == 1

    def test_a_head_is_written_into_another(self, lm):
        with lm.trace(EIFFEL) as t:
            t.layers[2].attn.z[0] = t.layers[1].attn.z[1]
            a, b = t.layers[1].attn.z[1].save(), t.layers[2].attn.z[0].save()
        assert torch.equal(a, b)

    def test_the_order_of_reads_of_one_place_counts(self, lm, v):
        """Both reads of layer 0 are captured in one run; each write takes its own."""
        with lm.trace(EIFFEL) as t:
            x = t.layers[0].output
            before = x[-1].clone()
            x[-1] += v
            t.layers[1].output[-1] = before
            t.layers[2].output[-1] = x[-1]
            p, q, first = t.layers[1].output[-1].save(), t.layers[2].output[-1].save(), before.save()
        assert torch.equal(p, first)
        torch.testing.assert_close(q, first + v)

    def test_a_cache_further_on_is_not_taken_for_the_read(self, lm, v):
        with lm.trace() as t:
            a, b = t.invoke(EIFFEL), t.invoke(COLOSSEUM)
            b.layers[1].output[-1] = a.layers[1].output[-1]
            a.layers[1].output[-1] += v
            cache, written = a.cache(pc.resid_post[1]), b.layers[1].output[-1].save()
        assert torch.equal(written, by_hand(lm, "resid_post[1]")[-1])
        torch.testing.assert_close(cache["resid_post[1]"][-1], written + v)

    def test_edits_and_sampling_of_the_call_act_in_every_run(self, lm, v):
        edits = [pc.Add(v, pc.resid_post[0]), pc.Zero(pc.mlp_out[0], tokens=pc.generated)]
        sampling = {"ignore_eos": True, "extra_args": {"fuzz_strength": 0.1, "fuzz_seed": 1}}
        with lm.trace(EIFFEL, max_tokens=3, edits=edits, sampling=sampling) as t:
            t.layers[2].output[-1] = t.layers[0].output[-1]
            a, b = t.layers[0].output[-1].save(), t.layers[2].output[-1].save()
        run = lm.run(EIFFEL, max_tokens=3, edits=edits, sampling=sampling, capture=["resid_post[0]"])
        assert torch.equal(b, torch.as_tensor(run["resid_post[0]"])[T - 1])
        assert a.shape == b.shape


class TestSeveralPrompts:
    def test_independent_prompts_are_one_batch(self, lm, calls):
        prompts = [f"The {'cat ' * (i % 5)}is in" for i in range(32)]
        shared = []
        with lm.trace(max_tokens=2) as t:
            for i, prompt in enumerate(prompts):
                with t.invoke(prompt) as a:
                    a.layers[1].output[-1] *= i
                    shared.append(a.layers[1].output[-1].save())
        assert calls == [32]
        assert len(shared) == len(t.invokes) == 32
        for i, (prompt, value) in enumerate(zip(prompts, shared, strict=True)):
            assert torch.equal(value, i * by_hand(lm, "resid_post[1]", prompt=prompt)[-1])
        assert (
            t.invokes[3].text
            == lm.run(prompts[3], max_tokens=2, edits=[pc.Scale(3, "resid_post[1]", tokens="prompt[-1]")]).text
        )

    def test_asyncio_batches_likewise(self, lm, monkeypatch):
        counts, arun = [], type(lm).arun

        async def counted(self, prompt, **rest):
            counts.append(len(prompt))
            return await arun(self, prompt, **rest)

        monkeypatch.setattr(type(lm), "arun", counted)

        async def traced():
            async with lm.trace() as t:
                saved = []
                for i in range(32):
                    with t.invoke([1, 2 + i, 3]) as a:
                        saved.append(a.layers[1].output.save())
            return saved

        saved = asyncio.run(traced())
        assert counts == [32]
        for i, value in enumerate(saved):
            assert torch.equal(value, by_hand(lm, "resid_post[1]", prompt=[1, 2 + i, 3]))

    def test_a_patch_across_prompts(self, lm, calls):
        with lm.trace() as t:
            with t.invoke(EIFFEL) as a:
                clean = a.layers[1].output[-1].save()
            with t.invoke(COLOSSEUM) as b:
                b.layers[1].output[-1] = a.layers[1].output[-1]
                patched, logits = b.layers[1].output[-1].save(), b.logits.save()
            with t.invoke(COLOSSEUM) as c:
                plain = c.logits.save()
        assert calls == [2, 1]
        assert torch.equal(clean, patched)
        source = lm.run(EIFFEL, max_tokens=1, capture=[pc.resid_post[1]])
        edit = pc.Replace(pc.From(source, pc.resid_post[1], pc.prompt[-1]), pc.resid_post[1], tokens=pc.prompt[-1])
        assert torch.equal(logits, by_hand(lm, "logits", [edit], COLOSSEUM))
        assert not torch.equal(logits, plain)

    def test_the_order_of_the_lines_does_not_matter_across_prompts(self, lm, calls):
        with lm.trace() as t:
            a, b, c = (t.invoke(prompt) for prompt in (EIFFEL, COLOSSEUM, "The city is in"))
            c.layers[2].output[-1] = b.layers[1].output[-1]
            b.layers[0].output[-1] = a.layers[0].output[-1]
            x, y, z = a.layers[0].output[-1].save(), b.layers[1].output[-1].save(), c.layers[2].output[-1].save()
            b0 = b.layers[0].output[-1].save()
        assert calls == [1, 1, 1]
        assert torch.equal(x, b0)
        assert torch.equal(y, z)

    def test_prompts_that_take_of_each_other_in_depth(self, lm):
        """No cycle: each value waits only for earlier layers of the other prompt."""
        with lm.trace() as t:
            a, b = t.invoke(EIFFEL), t.invoke(COLOSSEUM)
            b.layers[0].output[-1] = a.layers[0].output[-1]
            a.layers[2].output[-1] = b.layers[1].output[-1]
            pairs = [(a.layers[0].output[-1].save(), b.layers[0].output[-1].save()),
                     (b.layers[1].output[-1].save(), a.layers[2].output[-1].save())]  # fmt: skip
        for source, target in pairs:
            assert torch.equal(source, target)

    def test_a_generated_token_of_another_prompt(self, lm):
        with lm.trace(max_tokens=4) as t:
            a, b = t.invoke(EIFFEL), t.invoke(COLOSSEUM)
            b.layers[1].output[-1] = a.generated[2].layers[1].output
            x, y = a.generated[2].layers[1].output.save(), b.layers[1].output[-1].save()
        assert torch.equal(x, y)

    def test_one_prompts_error_leaves_the_others_and_the_engine(self, lm, v):
        """1e30 · 1e30 is no number of fp32: known only when it runs."""
        with pytest.raises(pc.RunError, match="not finite") as raised, lm.trace() as t:
            a, b, c = t.invoke(EIFFEL), t.invoke(COLOSSEUM), t.invoke(COLOSSEUM)
            fine = a.layers[1].output.save()
            b.layers[1].output[-1] = 1e30
            b.layers[1].output[-1] *= 1e30  # here
            failed = b.layers[1].output.save()
            c.layers[1].output[-1] = b.layers[1].output[-1]
            waited = c.layers[1].output.save()
        assert "b.layers[1].output[-1] *= 1e30  # here" in str(raised.value)
        assert torch.equal(fine, by_hand(lm, "resid_post[1]"))
        for gone in (failed, waited):
            with pytest.raises(pc.RunError, match="not finite"):
                gone.sum()
        assert a.error is None
        assert b.error is c.error is raised.value
        with lm.trace(EIFFEL) as t:
            assert t.layers[1].output.save() is not None

    def test_a_wrong_program_of_one_prompt_fails_it_alone(self, lm):
        with pytest.raises(pc.ShapeError, match=r"1 or 3 .*got 2") as raised, lm.trace() as t:
            a, b = t.invoke(EIFFEL), t.invoke(COLOSSEUM)
            b.layers[1].output[0:3] = a.layers[1].output[0:2]  # of another length
            fine, c = a.layers[1].output.save(), t.invoke(COLOSSEUM)
            also = c.layers[1].output.save()
        assert "# of another length" in str(raised.value)
        assert raised.value.path == "edits[0].value"
        assert fine.any()
        assert also.any()

    @pytest.mark.parametrize("wrong", [lambda a: a.layers[99].output, lambda a: 1 / 0], ids=["ours", "theirs"])
    def test_an_error_that_is_caught_drops_its_prompt_alone(self, lm, calls, wrong):
        values = {}
        with pytest.raises(pc.PatchclampError) as raised, lm.trace() as t:
            early = t.invoke("The city is in")
            for name, prompt in (("fine", EIFFEL), ("lost", COLOSSEUM), ("also", EIFFEL)):
                try:
                    with t.invoke(prompt) as a:
                        values[name] = a.layers[1].output.save()
                        if name == "lost":
                            early.layers[1].output[-1] = a.layers[1].output[-1]
                            cache = a.cache(pc.embed)
                            wrong(a)
                except (pc.PatchclampError, ZeroDivisionError):
                    with pytest.raises(pc.ProgramError, match="ended this block"):
                        a.layers[0].output.save()
            waits = early.layers[2].output.save()
        assert calls == [2]
        for name in ("fine", "also"):
            assert torch.equal(values[name], by_hand(lm, "resid_post[1]"))
        kind = type(t.invokes[2].error)
        assert t.invokes[2].error is early.error is raised.value  # what takes of it fails, and says so
        assert [invoke.error for invoke in t.invokes[1::2]] == [None, None]
        for gone in (values["lost"].sum, lambda: cache["embed"], waits.sum, lambda: t.invokes[2].run):
            with pytest.raises(kind, match=r"99|ZeroDivisionError"):
                gone()

    def test_prompts_that_errors_left_leave_nothing_to_run(self, lm, calls):
        with lm.trace() as t:
            for prompt in (EIFFEL, COLOSSEUM):
                with contextlib.suppress(pc.UnsupportedSite), t.invoke(prompt) as a:
                    a.layers[99].output.save()
        assert calls == []
        assert all("99" in str(invoke.error) for invoke in t.invokes)

    def test_scores_and_sampling_are_a_prompts_own(self, lm):
        with lm.trace(max_tokens=2, logprobs=True) as t:
            a, b = t.invoke(EIFFEL, score=[5, 6]), t.invoke(COLOSSEUM, sampling={"ignore_eos": True})
        assert a.run.scores == lm.run(EIFFEL, max_tokens=2, score=[5, 6]).scores
        assert b.run.scores == {}
        assert len(b.run.logprobs) == 2


class TestStreams:
    def test_tokens_come_and_then_the_values(self, lm, v):
        with lm.trace(EIFFEL, max_tokens=4, stream=True) as t:
            t.layers[1].output[-1] = t.layers[0].output[-1]
            t.generated.layers[1].output += v
            h = t.all().layers[1].output.save()
        parts = list(t)
        assert "".join(part.text for part in parts) == t.text
        assert [token for part in parts for token in part.token_ids] == t.token_ids
        assert h.shape == (T + 3, D)
        assert torch.equal(h[T - 1], by_hand(lm, "resid_post[0]")[-1])

    def test_asyncio(self, lm):
        async def streamed():
            async with lm.trace(EIFFEL, max_tokens=4, stream=True) as t:
                h = t.layers[1].output.save()
            return "".join([part.text async for part in t]), t.text, h

        text, whole, h = asyncio.run(streamed())
        assert text == whole
        assert torch.equal(h, by_hand(lm, "resid_post[1]"))

    def test_values_come_with_the_parts(self, lm, v):
        with lm.trace(EIFFEL, max_tokens=4, stream=True) as t:
            t.layers[1].output[-1] = t.layers[0].output[-1]
            h, third = t.all().layers[1].output.save(), t.generated[1].layers[1].output.save()
            both = (t.all().layers[1].output + 2 * t.all().layers[0].output).save()
            cache = t.cache(pc.resid_post[1], tokens=pc.prompt | pc.generated)
        with pytest.raises(pc.ProgramError, match="not streaming"):
            t.so_far(h)
        looked = []
        for number, _ in enumerate(t, 1):
            looked.append(t.so_far(h))
            assert (
                looked[-1].shape
                == (T + number - 1, D)
                == t.so_far(both).shape
                == t.so_far(cache)[pc.resid_post[1]].shape
            )
            if number < 3:
                with pytest.raises(pc.MissingSource, match=r"not available yet: .*\d tokens"):
                    t.so_far(third)
            else:
                assert torch.equal(t.so_far(third), looked[-1][T + 1])
            with pytest.raises(pc.ProgramError, match=r"\.save\(\)"):
                t.so_far(looked[-1])
        assert torch.equal(h, looked[-1])
        assert all(torch.equal(rows, h[: len(rows)]) for rows in looked)
        assert torch.equal(cache[pc.resid_post[1]], h)
        with pytest.raises(pc.ProgramError, match="not streaming"):
            t.so_far(h)

    def test_a_failing_stream_names_the_line(self, lm):
        with lm.trace(EIFFEL, max_tokens=4, stream=True) as t:
            t.layers[1].output[-1] = 1e30
            t.layers[1].output[-1] *= 1e30  # here
        with pytest.raises(pc.RunError, match=r"(?s)not finite.*# here"):
            list(t)

    def test_a_stream_that_is_left_has_no_values(self, lm):
        with lm.trace(EIFFEL, max_tokens=4, stream=True) as t:
            h = t.layers[1].output.save()
        for _ in t:
            break
        with pytest.raises(pc.EngineError, match="closed before its end"):
            h.sum()


class TestNamedPrograms:
    def test_a_program_is_recorded_listed_and_used_by_name(self, lm, v):
        with lm.edit("calm") as e:
            e.layers[1].output += 2 * v
            e.layers[0:2].mlp.output *= 0.5
            e.generated.layers[2].output -= v
        assert "calm" in lm.bank
        assert [f"{type(op).__name__} {op.at} @ {op.tokens}" for op in lm.bank["calm"].edits] == [
            "Add resid_post[1] @ every", "Scale mlp_out[0:2] @ every", "Add resid_post[2] @ generated",
        ]  # fmt: skip
        with lm.trace(EIFFEL, max_tokens=3, edits=[pc.Use("calm")]) as t:
            h = t.layers[2].output.save()
        assert torch.equal(h, by_hand(lm, "resid_post[2]", lm.bank["calm"].edits, max_tokens=3)[:T])
        assert t.text == lm.run(EIFFEL, max_tokens=3, edits=[pc.Use("calm")]).text

    def test_an_error_in_the_block_names_nothing(self, lm):
        with pytest.raises(ZeroDivisionError), lm.edit("half") as e:
            e.layers[1].output *= 2
            1 / 0  # noqa: B018
        assert "half" not in lm.bank
