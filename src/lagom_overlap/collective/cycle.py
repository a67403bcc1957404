"""The place of a call in the step, found from the sequence of calls on its communicator and from nothing else.

Each rank marks its own training steps, and the marks may differ: a rank skips an update, or runs an optimizer that no
other rank has. But all ranks of a communicator issue the same calls on it in the same order, or their collectives would
not match even without us. So a call's place is found by following that sequence through the calls of one step (the
*cycle*): equal sequences give equal places on every rank.

The rule (the plug-in has the same one in C, `csrc/lagom_tuner_look_up.c`): a call of some kind and size takes the next
place of such a call in the cycle, starting at the present place and wrapping around; a call that is not in the cycle
takes none and leaves the present place. After an evaluation, or a step cut short, the places are therefore right again
at the first call that occurs only once in the step.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from lagom_overlap.collective.call import CollectiveKind
from lagom_overlap.collective.size_class import class_bytes
from lagom_overlap.collective.space import ConfigKey


class CallCycle:
    """Follows the calls of one communicator through `keys`: those of one step, in the order of issue.

    `size_octaves` is the width of the classes that the keys' sizes stand for.
    """

    def __init__(self, keys: Sequence[ConfigKey], size_octaves: int = 0) -> None:
        self.place = 0
        """The present place: the search for the next call starts here."""
        self._keys = tuple(keys)
        self._octaves = size_octaves
        self._places: dict[tuple[CollectiveKind, int], list[int]] = defaultdict(list)
        for place, key in enumerate(self._keys):
            self._places[key.kind, key.num_bytes].append(place)

    def next_key(self, kind: CollectiveKind, num_bytes: int) -> ConfigKey | None:
        """The key of the next call on the communicator; None if the step has no such call."""
        places = self._places.get((kind, class_bytes(num_bytes, self._octaves)))
        if places is None:
            return None
        index = bisect_left(places, self.place)
        place = places[index] if index < len(places) else places[0]
        self.place = (place + 1) % len(self._keys)
        return self._keys[place]
