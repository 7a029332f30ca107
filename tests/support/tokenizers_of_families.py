"""Small tokenizers of the model families' kinds, trained when needed, with the families' chat templates."""

import json
from collections.abc import Callable
from functools import cache

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from .python_help import BY_NAME

LLAMA_2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' "
    "+ message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
PHI_3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
VICUNA = (
    "{{ bos_token + 'A chat.' }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ ' USER: ' + message['content'] }}{% else %}{{ ' ASSISTANT: ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)
"""Chat templates in their public forms, without system messages and tools."""

GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEXTS = [BY_NAME[start : start + 400] for start in range(0, 40_000, 400)] + [
    "one.\n\ntwo\n\n\nthree).\n",
    "  é  中文 \n",
]
BYTES = [f"<0x{number:02X}>" for number in range(256)]


def byte_level(pattern: str, special: tuple[str, ...], normal: bool) -> Tokenizer:
    """Return a byte-level BPE tokenizer like GPT-2's, Qwen's or Llama 3's; with `normal`, it normalises by NFC like
    Qwen's."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC() if normal else None
    pieces = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, special_tokens=list(special))
    )
    return backend


def sentencepiece_bpe(special: tuple[str, ...], *, prefix: str) -> Tokenizer:
    """Return a BPE tokenizer like Llama 2's, Mistral's or Gemma's, which encodes unknown characters as bytes.

    Args:
        prefix: where a space is added before text: "each" run between special tokens (Llama 2's and Mistral's earlier
            files), the "first" run alone (their later files), or "none" (Gemma).
    """
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=["<unk>", *special], max_token_length=12)
    trained.train_from_iterator(
        (word for text in TEXTS for word in text.replace(" ", " \u2581").replace("\n", " ").split(" ")), trainer
    )
    learned = json.loads(trained.to_str())["model"]
    vocabulary = dict(learned["vocab"])
    for letter in BYTES:
        vocabulary[letter] = len(vocabulary)
    merges = [tuple(one) for one in learned["merges"]]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = Tokenizer(model)
    backend.add_special_tokens(["<unk>", *special])
    backend.normalizer = {
        "each": normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
        "none": normalizers.Replace(" ", "\u2581"),
    }.get(prefix)
    if prefix == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    strip = [decoders.Strip(" ", 1, 0)] if prefix != "none" else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def unigram(special: tuple[str, ...]) -> Tokenizer:
    """Return a Unigram tokenizer with NFKC, split into words, with a space before each text."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    characters = sorted({letter for text in TEXTS for letter in text})
    trainer = trainers.UnigramTrainer(
        vocab_size=900, initial_alphabet=characters, special_tokens=["<unk>", *special], unk_token="<unk>"
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA_3_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
PHI_3_TOKENS = ("<|user|>", "<|assistant|>", "<|end|>")
S = ("<s>", "</s>")
KINDS: dict[str, tuple[Callable[[], Tokenizer], str, str, str]] = {
    "gpt-2 chatml": (lambda: byte_level(GPT_2, CHATML_TOKENS, normal=False), CHATML, "<|im_start|>", "<|im_end|>"),
    "qwen": (lambda: byte_level(GPT_4, CHATML_TOKENS, normal=True), CHATML, "<|endoftext|>", "<|im_end|>"),
    "llama-3": (lambda: byte_level(GPT_4, LLAMA_3_TOKENS, normal=False), LLAMA_3, "<|begin_of_text|>", "<|eot_id|>"),
    "llama-2": (lambda: sentencepiece_bpe(S, prefix="each"), LLAMA_2, "<s>", "</s>"),
    "llama-2 first": (lambda: sentencepiece_bpe(S, prefix="first"), LLAMA_2, "<s>", "</s>"),
    "mistral": (lambda: sentencepiece_bpe(S, prefix="each"), MISTRAL, "<s>", "</s>"),
    "mistral first": (lambda: sentencepiece_bpe(S, prefix="first"), MISTRAL, "<s>", "</s>"),
    "vicuna": (lambda: sentencepiece_bpe(S, prefix="each"), VICUNA, "<s>", "</s>"),
    "gemma": (
        lambda: sentencepiece_bpe(("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), prefix="none"),
        GEMMA,
        "<bos>",
        "<end_of_turn>",
    ),
    "phi-3": (lambda: sentencepiece_bpe((*S, *PHI_3_TOKENS), prefix="each"), PHI_3, "<s>", "<|end|>"),
    "unigram chatml": (lambda: unigram((*S, *CHATML_TOKENS)), CHATML, "<s>", "<|im_end|>"),
}
"""For each kind: the tokenizer, its chat template, the token that begins a text, and the token that ends a turn."""


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a kind in `KINDS`.

    Its EOS differs from the end of a turn if the family's does.
    """
    make, template, begin, end = KINDS[kind]
    backend = make()
    if "{{ bos_token" in template:  # in such families the tokenizer, too, puts it before a text
        first = [(begin, backend.token_to_id(begin))]
        backend.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=first)
    eos = {"llama-3": "<|end_of_text|>", "gemma": "<eos>", "phi-3": "</s>"}.get(kind, end)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=begin,
        eos_token=eos,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
    if "<unk>" in tokenizer.get_vocab():
        tokenizer.unk_token = "<unk>"
    if kind == "phi-3":  # its special tokens swallow the white space after them
        tokenizer.add_tokens([AddedToken(token, rstrip=True, normalized=False, special=True) for token in PHI_3_TOKENS])
    return tokenizer
