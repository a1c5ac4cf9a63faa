"""The token sequences of an episode, and the conversations that continue them."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from inflight.chat.conversation import Conversation
from inflight.episodes.segment import Message, Segment, num_common


class Mark(NamedTuple):
    """A place in a segment at which a conversation can continue."""

    segment: Segment
    length: int
    """Number of tokens up to here."""
    reply: Message | None = None
    """The last message, if it was drawn."""


class Conversations:
    """Finds the token sequence that messages or tokens continue, or begins one."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        """Token sequences, in the order of their beginnings."""
        self.num_rendered_again = 0
        """Number of conversations that began a new token sequence, because the template could not continue them or
        their history was rewritten."""
        self._marks: defaultdict[bytes, list[Mark]] = defaultdict(list)
        """Maps digests of conversations to the places up to which their tokens go."""

    def note(self, digest: bytes, segment: Segment, reply: Message | None = None) -> None:
        """Note that a conversation ends where the segment ends now. reply: its last message, if that was drawn."""
        if reply is not None or digest not in self._marks:
            self._marks[digest].append(Mark(segment, len(segment.token_ids), reply))

    def take_back(self, segment: Segment) -> None:
        """Forget the tokens that were given to a segment for a cancelled turn, unless a branch has them, too."""
        if any(other.forked_from is not None and other.forked_from[0] is segment for other in self.segments):
            return
        segment.take_back()
        for digest, marks in list(self._marks.items()):
            left = [mark for mark in marks if mark.segment is not segment or mark.length <= len(segment.token_ids)]
            if left:
                self._marks[digest] = left
            else:
                del self._marks[digest]

    def continue_messages(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        digests: Sequence[bytes],
        schemas: list[dict[str, Any]] | None,
        template_kwargs: dict[str, Any],
        adapter: str | None,
    ) -> tuple[Segment, list[int]]:
        """Return the segment that these messages continue, and the given tokens to append to it. digests: of each
        beginning of the conversation."""
        count = next((n for n in range(len(digests), 0, -1) if digests[n - 1] in self._marks), 0)
        if count:
            mark = self._mark(digests[count - 1], messages[count - 1])
            segment = mark.segment
            if count == len(digests):  # another reply to the same messages
                is_at_end = mark.length == len(segment.token_ids)
                was_cancelled = is_at_end and not (segment.ends_with_reply or segment.is_busy)
                return segment if was_cancelled else self._grown(mark), []
            if mark.reply is not None:
                tokens, new = segment.token_ids[: mark.length], messages[count:]
                more = conversation.extend(tokens, messages[:count], new, schemas, **template_kwargs)
                if more is not None:
                    return self._grown(mark), more
            self.num_rendered_again += 1
        return self.new(conversation.begin(messages, schemas, **template_kwargs), adapter), []

    def _mark(self, digest: bytes, last: Message) -> Mark:
        """Return the place of a conversation. Of equal conversations it is the one whose last message is this object;
        otherwise the first one that can still grow."""
        marks = self._marks[digest]
        ours = [mark for mark in marks if mark.reply is last]
        return (ours or [mark for mark in marks if self._is_open(mark)] or marks)[0]

    @staticmethod
    def _is_open(mark: Mark) -> bool:
        segment = mark.segment
        return mark.length == len(segment.token_ids) and segment.ends_with_reply and not segment.is_busy

    def continue_tokens(self, token_ids: list[int], adapter: str | None) -> tuple[Segment, list[int]]:
        """Return the segment that these tokens continue, and the given tokens to append to it. Tokens that leave a
        segment in its middle, also within a drawn turn, begin a branch there."""
        own = [segment for segment in self.segments if segment.adapter == adapter]
        found = [(num_common(segment.token_ids, token_ids), segment) for segment in own]
        shared, segment = max(found, key=lambda each: each[0], default=(0, None))
        if segment is None or shared < len(segment.prompt):
            return self.new(token_ids, adapter), []
        if shared == len(segment.token_ids) and segment.ends_with_reply and not segment.is_busy:
            return segment, token_ids[shared:]
        return self.new(token_ids[:shared], adapter, (segment, shared - len(segment.prompt))), token_ids[shared:]

    def _grown(self, mark: Mark) -> Segment:
        """Return the segment itself if it ends at the mark and can grow; otherwise a new one that begins with its
        tokens up to the mark."""
        segment = mark.segment
        if self._is_open(mark):
            return segment
        return self.new(segment.token_ids[: mark.length], segment.adapter, segment.origin(mark.length))

    def new(self, prompt: list[int], adapter: str | None, forked_from: tuple[Segment, int] | None = None) -> Segment:
        self.segments.append(Segment(prompt, adapter, forked_from))
        return self.segments[-1]
