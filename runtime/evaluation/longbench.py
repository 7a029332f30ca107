"""LongBench's English datasets (arXiv 2308.14508): their prompts, maximum answer tokens and metrics, as published."""

from dataclasses import dataclass

_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "Question: {input}\nAnswer:"
)
_STORY = (
    "Answer the question based on the story as concisely as you can, using a single phrase if possible. "
    "Do not provide any explanation.\n\n"
)
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.\n\n'
)


@dataclass(frozen=True)
class Dataset:
    """One dataset: a prompt with {context} and {input}. `bare` ones, with few-shot or code prompts, get no chat
    template."""

    prompt: str
    max_new_tokens: int
    metric: str
    bare: bool = False


DATASETS = {
    "narrativeqa": Dataset(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question as "
        "concisely as you can, using a single phrase if possible. Do not provide any explanation.\n\n"
        "Story: {context}\n\nNow, a" + _STORY[1:] + "Question: {input}\n\nAnswer:",
        128,
        "f1",
    ),
    "qasper": Dataset(
        "You are given a scientific article and a question. Answer the question "
        + _ARTICLE
        + "Article: {context}\n\n Answer the question based on the above article "
        + _ARTICLE
        + "Question: {input}\n\nAnswer:",
        128,
        "f1",
    ),
    "multifieldqa_en": Dataset(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
        "f1",
    ),
    "hotpotqa": Dataset(_PASSAGES, 32, "f1"),
    "2wikimqa": Dataset(_PASSAGES, 32, "f1"),
    "musique": Dataset(_PASSAGES, 32, "f1"),
    "gov_report": Dataset(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}"
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge-l",
    ),
    "qmsum": Dataset(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript "
        "in one or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        "rouge-l",
    ),
    "multi_news": Dataset(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:",
        512,
        "rouge-l",
    ),
    "trec": Dataset(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        64,
        "classification",
        bare=True,
    ),
    "triviaqa": Dataset(
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}",
        32,
        "f1-first-line",
        bare=True,
    ),
    "samsum": Dataset(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        128,
        "rouge-l-first-line",
        bare=True,
    ),
    "passage_count": Dataset(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully "
        "read these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of "
        "unique paragraphs after removing duplicates. The output format should only contain the number, such as 1, 2, "
        "3, and so on.\n\nThe final answer is: ",
        32,
        "count",
    ),
    "passage_retrieval_en": Dataset(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph "
        'that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\n'
        "The answer is: ",
        32,
        "retrieval",
    ),
    "lcc": Dataset(
        "Please complete the code given below. \n{context}Next line of code:\n", 64, "code-similarity", bare=True
    ),
    "repobench-p": Dataset(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        "code-similarity",
        bare=True,
    ),
}
