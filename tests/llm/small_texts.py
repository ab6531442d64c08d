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


GGUF_TENSORS = {
    "attn_norm": (32,), "ffn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32),
    "attn_v": (16, 32), "attn_output": (32, 32), "ffn_gate": (64, 32), "ffn_up": (64, 32),
    "ffn_down": (32, 64),
}  # fmt: skip


def write_gguf(path):
    """Write a random Llama with one block and its tokenizer as a GGUF file; return its tensors."""
    import gguf

    words = ["<s>", "</s>", *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "th", "the"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_merges(["t h", "th e"])
    writer.add_token_types([3, 3] + [1] * (len(words) - 2))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (len(words), 32), "output": (len(words), 32), "output_norm": (32,)}
    shapes |= {f"blk.0.{name}": shape for name, shape in GGUF_TENSORS.items()}
    tensors = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, values in tensors.items():
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors
