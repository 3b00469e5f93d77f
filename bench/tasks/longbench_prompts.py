"""Prompts of LongBench v1's tasks, in our words: what stands before the context, and what after it.

They ask for what the original prompts ask for (the answer's form, its length, what to say where there is none), so that the
metrics mean the same; scores are to be compared with runs of these prompts only. ``{input}`` is the record's own.
"""

from typing import NamedTuple


class Prompt(NamedTuple):
    """Text round a context. ``chat``: it goes into a chat template; code and few-shot prompts are continued as they are."""

    before: str
    after: str
    chat: bool = True


PASSAGES = Prompt(
    "Use the passages that follow to answer a question. Give the answer alone, without an explanation.\n\nPassages:\n",
    "\n\nGive the answer to this question alone, without other words.\n\nQuestion: {input}\nAnswer:",
)

PROMPTS = {
    "narrativeqa": Prompt(
        "What follows is a story, a novel or the script of a film. A question about it comes behind it.\n\nStory: ",
        "\n\nAnswer from the story, as briefly as you can: a phrase, if that will do, and no explanation.\n\n"
        "Question: {input}\n\nAnswer:",
    ),
    "qasper": Prompt(
        "Read a scientific paper, then answer a question about it.\n\nPaper: ",
        "\n\nAnswer with a phrase or one sentence from the paper. Where the paper does not answer the question, write "
        '"unanswerable"; where it asks for yes or no, write "yes", "no" or "unanswerable". Explain nothing.\n\n'
        "Question: {input}\n\nAnswer:",
    ),
    "multifieldqa_en": Prompt(
        "A text follows, and then a question about it.\n\n",
        "\n\nAnswer briefly from the text above, with nothing else.\n\nQuestion: {input}\nAnswer:",
    ),
    "multifieldqa_zh": Prompt(
        "请先读下面这段文字，再作简短的回答。\n\n", "\n\n根据上文回答，只写答案。\n\n问题：{input}\n答案："
    ),
    "hotpotqa": PASSAGES,
    "2wikimqa": PASSAGES,
    "musique": PASSAGES,
    "dureader": Prompt(
        "下面是若干篇文章，请据此回答一个问题。\n\n文章：", "\n\n请依据这些文章作答。\n\n问题：{input}\n答案："
    ),
    "gov_report": Prompt(
        "A government agency wrote the report that follows.\n\nThe report:\n",
        "\n\nSummarise this report on one page.\n\nThe summary:",
    ),
    "qmsum": Prompt(
        "The record of a meeting follows. Someone who was not there wants to know something about it.\n\nThe meeting:\n",
        "\n\nReply to the request in one or a few sentences, from what was said.\n\nRequest: {input}\nReply:",
    ),
    "multi_news": Prompt(
        "Several news articles follow that tell of one event.\n\nThe articles:\n",
        "\n\nSummarise all articles together on one page.\n\nThe summary:",
    ),
    "vcsum": Prompt("以下是一次会议的记录。\n\n记录：\n", "\n\n请概括这次会议的内容。\n\n概要："),
    "trec": Prompt("Each question below has a type behind it. Give the last one's type.\n\n", "\n{input}", chat=False),
    "triviaqa": Prompt(
        "Each passage below has a question and its answer behind it. Answer the last question, with the answer alone.\n\n",
        "\n\n{input}",
        chat=False,
    ),
    "samsum": Prompt(
        "Each conversation below has a summary behind it. Summarise the last one.\n\n", "\n\n{input}", chat=False
    ),
    "lsht": Prompt("下面每条新闻后面写有它的类别。请写出最后一条新闻的类别。\n\n", "\n{input}", chat=False),
    "passage_count": Prompt(
        "Numbered paragraphs follow, some of which are copies of others. Find out how many remain when each text is kept "
        "once.\n\n",
        "\n\nHow many different paragraphs are there? Write the number alone (7, for instance).\n\nThe number:",
    ),
    "passage_retrieval_en": Prompt(
        "Thirty paragraphs follow, and behind them an abstract of one of these.\n\n",
        '\n\nThe abstract:\n{input}\n\nWhich paragraph is it of? Reply in the form "Paragraph 7".\n\nReply:',
    ),
    "passage_retrieval_zh": Prompt(
        "下面有若干段落，其后是其中某一段的摘要。\n\n",
        "\n\n摘要：\n{input}\n\n这是哪一段的摘要？请按“段落7”的格式回答。\n\n回答：",
    ),
    "lcc": Prompt("Write the next line of this code.\n", "The next line:\n", chat=False),
    "repobench-p": Prompt("Write the next line of this code.\n", "{input}The next line:\n", chat=False),
}
