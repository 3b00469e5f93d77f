"""SGLang's CUDA graphs of the target's verification: one set for each number of new tokens that a request can have.

SGLang makes one set, of the stride. A tree's server wants more of them: a step without drafts need not run a whole tree's rows.
"""

from typing import Any

from sglang.srt.model_executor.runner import DecodeCudaGraphRunner


class TargetGraphs:
    """The sets, of which the model runner has one at a time."""

    def __init__(self, runner: Any, first: Any) -> None:
        """Take over what SGLang made.

        Args:
            runner: the target's model runner; its attention backend is ours.
            first: its set.
        """
        self.runner = runner
        self.sets: dict[tuple[int, int | None], Any] = {(first.num_tokens_per_bs, None): first}

    def add(self, width: int, columns: int | None = None, lists: int = 1) -> None:
        """Capture a set for ``width`` new tokens a request, at SGLang's own batch sizes.

        Args:
            width: new tokens.
            columns: cached tokens at most that a request's view has, of a set that verifies on views: attention kernels split their
                work by how long a page list may be. None: a set for whole caches.
            lists: of each request.
        """
        key = width, columns
        if key not in self.sets:
            backend = self.runner.attn_backend.sibling(columns, lists)
            self.sets[key] = DecodeCudaGraphRunner(
                self.runner, attn_backend=backend, speculative_num_draft_tokens=width
            )

    def select(self, requests: int, rows: int, columns: int | None = None) -> int | None:
        """Have the next verification replay the narrowest set that holds ``rows`` new tokens of each request.

        Args:
            requests, rows: of the verification.
            columns: of :meth:`add`.

        Returns:
            Its new tokens a request, to which rows must be padded; None where no graph holds the batch.
        """
        width = min((w for w, read in self.sets if w >= rows and read == columns), default=None)
        if width is None or requests > self.sets[width, columns].max_bs:
            return None
        self.runner.decode_cuda_graph_runner = self.sets[width, columns]
        return width
