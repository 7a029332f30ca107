"""Time plain transformers, as the baseline: prefill a document and answer, in one process.

Run it as `python docs/benchmarks/plain_transformers.py MODEL_FOLDER TEXT TOKENS CHUNK [NEW_TOKENS]`. It prints a line
of JSON with the seconds to import, to load, to prefill the document in chunks, and to answer. transformers chooses the
attention implementation. Nothing of sparsekv is imported.
"""

import json
import sys
import time

started = time.perf_counter()

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache  # noqa: E402

imported = time.perf_counter()


def now() -> float:
    """Wait until the device has finished its work; return the time in seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.inference_mode()
def main(folder: str, text: str, tokens: int, chunk: int, new_tokens: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map=device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loaded = now()
    with open(text, encoding="utf-8") as file:
        ids = tokenizer(file.read(), return_tensors="pt").input_ids[:, :tokens].to(device)
    tokenised = now()
    cache = DynamicCache(config=model.config)
    for start in range(0, tokens, chunk):
        part = ids[:, start : start + chunk]
        logits = model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    prefilled = now()
    for _ in range(new_tokens):
        token = logits[:, -1].argmax(-1, keepdim=True)
        logits = model(input_ids=token, past_key_values=cache, use_cache=True).logits
        token.item()  # as a user sees it, token by token
    ended = now()
    seconds = {
        "import": imported - started,
        "load": loaded - imported,
        "tokenise": tokenised - loaded,
        "prefill": prefilled - tokenised,
        "answer": ended - prefilled,
    }
    print(json.dumps({"chunk": chunk, **{name: round(one, 3) for name, one in seconds.items()}}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]) if sys.argv[5:] else 4)
