"""The search tool: passages for the policy's queries, from a retrieval server or from a local BM25 index.

queries ─► POST {queries, topk, return_scores} to `retrieval_service_url`   (the protocol of Search-R1's server)
        └► BM25 over `corpus`, indexed once and kept in the cache folder
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.agents.schemas import OpenAIFunctionToolSchema, ToolResponse
from lockstep.agents.tools.calls import ToolError
from lockstep.agents.tools.passages import PassageIndex
from lockstep.agents.tools.tool import TOOLS, BaseTool, Executed, tool_schema
from lockstep.utils.json_http import HttpError, post_json

KNOWN = (
    *("retrieval_service_url", "corpus", "index_dir", "topk", "timeout", "num_workers", "rate_limit"),
    *("enable_global_rate_limit", "type"),
)
MAX_QUERIES = 8


@TOOLS.register("search")
class SearchTool(BaseTool):
    """Looks up `query_list` (or `query`) and returns the best `topk` (3) passages of each.

    config: `retrieval_service_url`, or `corpus` (jsonl or parquet files with `contents`, or `title` and `text`) with `index_dir`
    for the index (the cache folder by default); `timeout` (30) of a call in seconds, retries included; `rate_limit` (64)
    requests or `num_workers` (4) local searches at once.
    """

    def __init__(self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        if unknown := sorted(set(config) - set(KNOWN)):
            raise ValueError(f"the search tool has no setting {', '.join(unknown)}; known: {', '.join(KNOWN)}")
        self.url = config.get("retrieval_service_url")
        corpus = config.get("corpus")
        if (self.url is None) == (corpus is None):
            raise ValueError("the search tool needs either config.retrieval_service_url or config.corpus")
        self.topk = int(config.get("topk", 3))
        self.timeout_s = float(config.get("timeout", 30.0))
        if self.topk < 1 or self.timeout_s <= 0:
            raise ValueError("config.topk must be at least 1 and config.timeout above 0")
        self.index = None if corpus is None else PassageIndex(corpus, config.get("index_dir"))
        at_once = config.get("rate_limit", 64) if self.index is None else config.get("num_workers", 4)
        self._slots = threading.Semaphore(max(1, int(at_once)))

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        queries = {"type": "array", "items": {"type": "string"}, "description": "The queries, each a full sentence."}
        return tool_schema("search", "Search for passages that answer each query.", query_list=queries)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        queries = parameters.get("query_list", parameters.get("query"))
        queries = [queries] if isinstance(queries, str) else queries
        if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
            raise ToolError("query_list must be a list of texts")
        if len(queries) > MAX_QUERIES:
            raise ToolError(f"query_list has {len(queries)} queries, at most {MAX_QUERIES} are allowed")
        if not self._slots.acquire(timeout=self.timeout_s):  # blocks the thread of this call only
            raise ToolError("too many searches at once; try again")
        try:
            found = self._search(queries) if self.index is not None else await self._retrieve(queries)
        finally:
            self._slots.release()
        return ToolResponse(text="\n---\n".join(map(passages_text, found))), None, {}

    def _search(self, queries: Sequence[str]) -> list[list[str]]:
        assert self.index is not None
        return [self.index.search(query, self.topk) for query in queries]

    async def _retrieve(self, queries: Sequence[str]) -> list[list[str]]:
        body = {"queries": list(queries), "topk": self.topk, "return_scores": True}
        try:
            answer = await post_json(str(self.url), body, timeout_s=self.timeout_s)
            found = [[_contents_of(item) for item in items] for items in answer["result"]]
        except HttpError as error:
            raise ToolError(f"the search failed: {error}") from error
        except (KeyError, TypeError) as error:
            raise ToolError(f"the search server's answer has no list of passages per query: {error!r}") from error
        return found


def _contents_of(item: Any) -> str:
    """The passage of a result: `{"document": {"contents": ...}, "score": ...}`, or the document alone without scores."""
    document = item.get("document", item)
    return str(document["contents"])


def passages_text(contents: Sequence[str]) -> str:
    """`Doc 1 (Title: ...)` and the text, for each passage; the title is its first line."""
    if not contents:
        return "No results."
    parts = []
    for number, passage in enumerate(contents, 1):
        title, _, text = passage.partition("\n")
        parts.append(f"Doc {number} (Title: {title.strip()})\n{text.strip()}")
    return "\n\n".join(parts)
