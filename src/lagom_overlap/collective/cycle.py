"""Which call of a step a call is, told by the sequence of calls on its communicator and by nothing else.

Ranks mark their training steps each by itself, and may come to mark them differently: a rank skips an update, or runs
an optimizer that no other rank has. All ranks of a communicator issue the same calls on it in the same order, however,
or their collectives would not fit each other without us either. So a call's place in the step is found by following
that sequence through the step's own (its *cycle*): equal sequences give equal places on every rank.

The rule, of which the plug-in in C has a twin (`csrc/lagom_tuner_look_up.c`): a call (its kind and size) takes the
next place of such a call in the cycle, from the present place on and around the end if need be; a call that the cycle
does not have takes none, and the present place stays. So after the calls of an evaluation, or of a step cut short, the
places are right again as soon as a call comes that the step has only once.
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
        """The present place: the next call is looked for from here on."""
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
