"""Small texts by author in the formats of the real ones, and a small model with a tokenizer."""

import json

import numpy as np

ROLES = ("HAM", "Ophelia", "KING", "GHOST")
WORDS = {
    "HAM": "to be or not that is the question",
    "Ophelia": "my lord he hath much tenders made",
    "KING": "though yet of our dear brother memory",
    "GHOST": "mark me list adieu remember thy murder",
}


def speech(role, number):
    draw = np.random.default_rng([number, len(role)])
    return " ".join(draw.choice(WORDS[role].split(), 40)) + "."


def write_play(folder, speeches=20):
    """Write a play; each role speaks fewer times than the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["HAMLET", "", "ACT I.", "", "Scene I. A platform.", "", "[Enter all.]", ""]
    for number in range(speeches):
        for place, role in enumerate(ROLES):
            if number < speeches - 3 * place:
                lines += [f"{role}.", f"[Aside] {speech(role, number)}", ""]
    (folder / "hamlet_gut.txt").write_text("\n".join(lines))
    return folder


def write_speeches(folder):
    """Write two speeches of one president and one of another."""
    folder.mkdir(parents=True, exist_ok=True)
    for year, name in ((1790, "Ann"), (1791, "Bob"), (1792, "Ann")):
        text = f"{year} " + "fellow citizens of the senate " * 20
        about = {"year": year, "name": name, "party": "n", "text": text}
        (folder / f"{year}_{name}.json").write_text(json.dumps(about))
    return folder


def write_model(folder):
    """Write a random Llama and a tokenizer of words, as transformers does."""
    import tokenizers
    import transformers

    words = sorted({word for text in WORDS.values() for word in text.split()})
    vocabulary = {word: n for n, word in enumerate(["?", "</s>", ".", *words])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="?", eos_token="</s>"
    )
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
