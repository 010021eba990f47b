"""The last word on each key, in the order it was said."""

from __future__ import annotations

import random

from patchclamp.engines.vllm import admission
from patchclamp.engines.vllm.admission import LastWords


def test_readers_learn_the_last_word_on_every_key_once():
    words, said, order = LastWords(), {}, []
    known: dict[int, dict[str, bytes]] = {reader: {} for reader in range(3)}
    numbers = dict.fromkeys(known, 0)
    for turn in range(400):
        if random.random() < 0.5:
            key, word = f"key {random.randrange(12)}", str(turn).encode()
            words.say(key, word)
            said[key] = word
            order.append(word)
        reader = random.randrange(3)
        numbers[reader], news = words.since(numbers[reader])
        assert [word for word in order if word in news] == news
        known[reader] |= {key: word for key, word in said.items() if word in news}
        assert known[reader] == said
        assert words.since(numbers[reader]) == (numbers[reader], [])
    assert len(order) > 100


def test_the_oldest_words_go_first(monkeypatch):
    monkeypatch.setattr(admission, "MAX_WORDS", 3)
    words = LastWords()
    for key in "abcda":
        words.say(key, key.encode())
    assert words.since(0) == (5, [b"c", b"d", b"a"])
