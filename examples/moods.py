"""Texts of two moods, which the journeys tell apart."""

PLEASANT = [
    "I love this song, it makes me happy every morning.", "What a wonderful day, the sun is out and all are smiling.",
    "Thank you so much, you are so kind and generous.", "She was delighted with the beautiful flowers.",
    "The children laughed and played in the warm garden.", "It was the best meal I have ever had, truly delicious.",
    "Our friends brought joy, gifts and good news.", "The holiday was perfect, we felt calm and grateful.",
    "He smiled with pride as his daughter won the prize.", "This is an excellent book, charming and full of hope.",
    "I am so glad that you came, it was a lovely evening.", "The view from the hill is gorgeous and peaceful.",
]  # fmt: skip
UNPLEASANT = [
    "I hate this noise, it makes me sick every morning.", "What a terrible day, the storm destroyed all that we had.",
    "Go away, you are so cruel and selfish.", "She was devastated by the awful accident.",
    "The soldiers screamed and died in the cold mud.", "It was the worst meal I have ever had, truly disgusting.",
    "Our enemies brought pain, lies and death.", "The holiday was ruined, we felt angry and betrayed.",
    "He wept with shame as his daughter was arrested.", "This is a dreadful book, boring and full of hate.",
    "I am so sorry that you lost him, it was a horrible night.", "The smell from the swamp is rotten and poisonous.",
]  # fmt: skip
