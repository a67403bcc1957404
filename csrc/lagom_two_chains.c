/* Two chains of tasks at once, exactly; part of liblagom_list_schedule.so.
 *
 * Two jobs whose tasks run one after the other are a path in a plane (Akers 1956): to the right runs the first, upward
 * the second, diagonally both; a pair of tasks on one resource is an obstacle. From where both are about to start a
 * task, they run until they meet an obstacle, and go around it either way: the first goes first, or the second. States
 * are pairs of tasks that are about to start; the least time of each is found in order.
 *
 * A resource's idle time until the first of the two has ended bounds every schedule in which nothing else can run before
 * that: for any progress of the second at that moment the idle time is least if the moment is earliest, and the path
 * that gets there first is among those tried.
 */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>

#define API __attribute__((visibility("default")))

enum { MAX_STATES = 1 << 27 };

struct chain {
    int64_t num;
    const int64_t *ticks;
    const int32_t *resource;
    int64_t *until; /* ticks of the tasks before each one */
    int64_t *work;  /* [task][resource]: ticks on it before each one */
};

static int chain_open(struct chain *c, int64_t num, const int64_t *ticks, const int32_t *resource, int64_t resources) {
    *c = (struct chain){num, ticks, resource, calloc((size_t)num + 1, sizeof(int64_t)),
                        calloc(((size_t)num + 1) * (size_t)resources, sizeof(int64_t))};
    if (!c->until || !c->work) return 0;
    for (int64_t i = 0; i < num; i++) {
        c->until[i + 1] = c->until[i] + ticks[i];
        for (int64_t r = 0; r < resources; r++)
            c->work[(i + 1) * resources + r] = c->work[i * resources + r] + (resource[i] == r ? ticks[i] : 0);
    }
    return 1;
}

static void chain_close(struct chain *c) {
    free(c->until);
    free(c->work);
}

/* When both start a task no earlier than this, whatever happened before. */
static int64_t earliest(const struct chain *a, const struct chain *b, int64_t i, int64_t j) {
    return a->until[i] > b->until[j] ? a->until[i] : b->until[j];
}

/* Notes that task i of the first and task j of the second can start at `time`; states hold the delay plus 1. */
static int note(uint32_t *states, const struct chain *a, const struct chain *b, int64_t i, int64_t j, int64_t time) {
    int64_t delay = time - earliest(a, b, i, j) + 1;
    uint32_t *state = &states[i * (b->num + 1) + j];
    if (delay >= UINT32_MAX) return 0;
    if (!*state || delay < *state) *state = (uint32_t)delay;
    return 1;
}

/* Idle time of each resource until `now`, at which the first has ended and the second's task j runs since `begin`. */
static void note_idle(const struct chain *ended, const struct chain *other, int64_t j, int64_t begin, int64_t now,
                      int64_t num_resources, int64_t *idle) {
    for (int64_t r = 0; r < num_resources; r++) {
        int64_t busy = ended->work[ended->num * num_resources + r] + other->work[j * num_resources + r];
        if (j < other->num && other->resource[j] == r && now > begin) busy += now - begin;
        if (now - busy < idle[r]) idle[r] = now - busy;
    }
}

/* The least idle time of each resource until the first of two chains has ended; returns the least makespan of both, or
 * minus an errno (EFBIG: too many states). */
API int64_t lls_two_chains(int64_t num_a, const int64_t *ticks_a, const int32_t *resource_a, int64_t num_b,
                           const int64_t *ticks_b, const int32_t *resource_b, int64_t num_resources, int64_t *idle) {
    if (num_a < 1 || num_b < 1 || num_resources < 1) return -EINVAL;
    if (num_a >= MAX_STATES || num_b >= MAX_STATES || (num_a + 1) * (num_b + 1) > MAX_STATES) return -EFBIG;
    struct chain a, b;
    int opened = chain_open(&a, num_a, ticks_a, resource_a, num_resources) &
                 chain_open(&b, num_b, ticks_b, resource_b, num_resources);
    uint32_t *states = calloc((size_t)((num_a + 1) * (num_b + 1)), sizeof *states);
    int64_t makespan = opened && states ? INT64_MAX : -ENOMEM;
    for (int64_t r = 0; r < num_resources; r++) idle[r] = INT64_MAX;
    if (makespan > 0) note(states, &a, &b, 0, 0, 0);
    for (int64_t first = 0; first <= num_a && makespan > 0; first++) {
        for (int64_t second = 0; second <= num_b && makespan > 0; second++) {
            uint32_t state = states[first * (num_b + 1) + second];
            if (!state) continue;
            int64_t i = first, j = second, at_i = earliest(&a, &b, i, j) + state - 1, at_j = at_i;
            while (i < num_a && j < num_b) {
                int64_t end_i = at_i + ticks_a[i], end_j = at_j + ticks_b[j];
                if (resource_a[i] == resource_b[j]) {
                    if (!note(states, &a, &b, i + 1, j, end_i > at_j ? end_i : at_j) ||
                        !note(states, &a, &b, i, j + 1, end_j > at_i ? end_j : at_i))
                        makespan = -ERANGE;
                    break;
                }
                if (end_i <= end_j) i++, at_i = end_i;
                if (end_j <= end_i) j++, at_j = end_j;
            }
            if (i < num_a && j < num_b) continue;
            int64_t rest_i = at_i + a.until[num_a] - a.until[i], rest_j = at_j + b.until[num_b] - b.until[j];
            int64_t longer = rest_i > rest_j ? rest_i : rest_j;
            if (longer < makespan) makespan = longer;
            if (i == num_a) note_idle(&a, &b, j, at_j, at_i, num_resources, idle);
            if (j == num_b) note_idle(&b, &a, i, at_i, at_j, num_resources, idle);
        }
    }
    free(states);
    chain_close(&a);
    chain_close(&b);
    return makespan;
}
