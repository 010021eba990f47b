"""Where the messages of a chat stand in its prompt: exactly where they were put, or nowhere."""

from __future__ import annotations

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

import patchclamp as pc
from patchclamp.engines.tokenizer import chat_of, find_turns, has_images

TEMPLATES = {
    "chatml": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<end>\n{% endfor %}<|assistant|>\n",
    "trimmed": "<s>{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}",
    "default": "{% if messages[0].role != 'system' %}be kind\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
}
CHANGED = {
    "upper": "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    "dropped": "{{ messages[0].content }}",
    "twice": "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    "cut": "{% for m in messages %}{{ m.content.split('k')[-1] }}|{% endfor %}",
    "backwards": "{% for m in messages | reverse %}{{ m.content }}|{% endfor %}",
}
words = st.text("abk <|\n", min_size=1, max_size=6).filter(str.strip)
chats = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), words), min_size=1, max_size=4)


def render(template: str):
    return lambda messages: jinja2.Template(template, keep_trailing_newline=True).render(messages=messages)


def letters(text: str):
    """Every character is a token."""
    return text, [(i, i + 1) for i in range(len(text))]


@pytest.mark.parametrize("name", TEMPLATES)
@given(chat=chats)
def test_each_message_is_where_the_template_puts_it(name, chat):
    messages = [{"role": role, "content": content} for role, content in chat]
    text = render(TEMPLATES[name])(messages)
    turns = find_turns(render(TEMPLATES[name]), lambda _: letters(text), messages)
    at = 0
    for (role, positions), message in zip(turns, messages, strict=True):
        said = message["content"].strip() if name == "trimmed" else message["content"]
        assert role == message["role"]
        assert positions == list(range(positions[0], positions[0] + len(said)))
        assert "".join(text[i] for i in positions) == said
        assert positions[0] >= at
        at = positions[-1] + 1


@pytest.mark.parametrize("name", CHANGED)
def test_a_template_that_changes_messages_is_refused(name):
    messages = [{"role": "user", "content": "a k b"}, {"role": "user", "content": "kind"}]
    with pytest.raises(pc.TokensError, match=r"role\(\).*template"):
        find_turns(render(CHANGED[name]), letters, messages)


def test_a_prompt_that_is_not_the_chats_is_refused():
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(pc.TokensError, match=r"role\(\).*differs"):
        find_turns(render(TEMPLATES["chatml"]), lambda text: letters(text + "!"), messages)


def test_a_chat_with_an_image_has_no_roles_and_the_image_is_not_remembered():
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is it"}, url]}]
    with pytest.raises(pc.TokensError, match=r"role\(\).*images"):
        find_turns(render(TEMPLATES["chatml"]), letters, messages)
    assert has_images(messages)
    assert not has_images([{"role": "user", "content": [{"type": "text", "text": "what"}]}, {"role": "assistant"}])
    kept = chat_of(messages)
    assert kept.messages == [
        {"role": "user", "content": [{"type": "text", "text": "what is it"}, {"type": "image_url"}]}
    ]
    with pytest.raises(pc.TokensError, match=r"role\(\).*images"):
        find_turns(render(TEMPLATES["chatml"]), letters, kept.messages)


def test_what_says_nothing_has_no_tokens_and_parts_are_joined():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "x"},
    ]
    [(_, first), (_, second), (_, third)] = find_turns(render(TEMPLATES["chatml"]), letters, messages)
    assert (len(first), second, len(third)) == (len("one\ntwo"), [], 1)


def test_a_role_selects_in_a_run_and_in_the_run_that_it_reads():
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "a dog"},
                {"role": "user", "content": "hello world"}]  # fmt: skip
    with pc.LM("fake", engine="fake") as lm:
        last = lm.run(messages=messages, max_tokens=1, capture=[pc.resid_post[1] @ pc.role("user")[-1]])
        [position] = last.positions(pc.resid_post[1])
        assert lm.tokenizer.token_strings(last.prompt_token_ids)[position] == " world"
        assert last.select('role("user", 0)').tolist() != last.select('role("user")').tolist()
        edit = pc.Replace(
            pc.From(last, pc.resid_post[1], pc.role("user")[-1]), at=pc.resid_post[1] @ pc.role("user", 0)[0]
        )
        by_hand = pc.Replace(
            pc.From(last, pc.resid_post[1], pc.prompt[position]),
            at=pc.resid_post[1] @ pc.prompt[last.select('role("user")')[0]],
        )
        runs = [
            lm.run(messages=messages, max_tokens=4, logprobs=True, edits=edits) for edits in ([edit], [by_hand], [])
        ]
        assert runs[0].logprobs == runs[1].logprobs != runs[2].logprobs
        with pytest.raises(pc.TokensError, match="the prompt is not a chat"):
            lm.run("the cat", edits=[pc.Zero(pc.embed, tokens=pc.role("user"))])


def test_a_last_message_of_the_assistants_is_continued():
    """`lm.tokens` shows what runs, and `role` finds the words that are continued."""
    fake = pc.LM("fake", prove=False)
    chat = [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "It is"}]
    ids = fake.tokens(messages=chat)
    closed = fake.tokens(messages=chat, chat_template_kwargs={"continue_final_message": False})
    assert closed[: len(ids)] == ids != closed
    run = fake.run(messages=chat, max_tokens=1, capture=pc.embed @ pc.role("assistant"))
    assert run.prompt_token_ids == ids
    assert run.positions(pc.embed)[-1] == len(ids) - 1
    for wrong in ({"messages": []}, {"messages": "hi"}, {"messages": chat, "chat_template_kwargs": 3},
                  {"prompt": "hi", "chat_template_kwargs": {}}):  # fmt: skip
        with pytest.raises(pc.ProgramError):
            fake.run(**wrong)
