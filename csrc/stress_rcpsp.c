/* Drives lagom_rcpsp.c under sanitizers: random projects, some of them wrong, every schedule checked period by period.
 *   stress_rcpsp [projects] [seed]
 */
#include "lagom_rcpsp.c"
#include <stdio.h>

enum { MOST = 40, MOST_RESOURCES = 12, MOST_DURATION = 9 };

static uint64_t state;
static unsigned rnd(unsigned n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)((state >> 33) % n);
}

struct project {
    int num, num_resources, num_arcs;
    int32_t durations[MOST];
    int64_t demands[MOST * MOST_RESOURCES], capacities[MOST_RESOURCES];
    int32_t arcs[2 * MOST * MOST];
};

static struct project random_project(void) {
    static const int64_t most[] = {0, 1, 7, 30, 1000000000000, INT64_MAX / 2};
    struct project q = {.num = 1 + (int)rnd(MOST), .num_resources = (int)rnd(MOST_RESOURCES + 1)};
    for (int r = 0; r < q.num_resources; r++) q.capacities[r] = most[rnd(6)];
    for (int i = 0; i < q.num; i++) {
        q.durations[i] = (int32_t)rnd(MOST_DURATION + 1);
        for (int r = 0; r < q.num_resources; r++) {
            int64_t capacity = q.capacities[r], part = capacity / 8 * rnd(9);
            q.demands[i * q.num_resources + r] = rnd(2) ? 0 : part ? part : capacity;
        }
        for (int before = 0; before < i; before++)
            if (!rnd(8)) q.arcs[2 * q.num_arcs] = before, q.arcs[2 * q.num_arcs++ + 1] = i;
    }
    return q;
}

static struct lagom_rcpsp *opened(const struct project *q, int *error) {
    return lr_open(q->num, q->num_resources, q->durations, q->demands, q->capacities, q->num_arcs, q->arcs, state,
                   8 + (int)rnd(60), error);
}

/* Whether the library refuses the project with one thing in it broken. */
static bool is_refused(struct project q) {
    int error = 0;
    switch (rnd(6)) {
    case 0: q.num = rnd(2) ? 0 : MAX_ACTIVITIES + 1; break;
    case 1: q.num_resources = rnd(2) ? -1 : MAX_RESOURCES + 1; break;
    case 2: q.num_arcs = rnd(2) ? -1 : MAX_ARCS + 1; break;
    case 3: q.durations[rnd((unsigned)q.num)] = rnd(2) ? -1 : INT32_MAX; break;
    case 4: q.arcs[2 * q.num_arcs] = q.arcs[2 * q.num_arcs + 1] = rnd(2) ? 0 : q.num, q.num_arcs++; break;
    default:
        q.num_resources = 1, q.capacities[0] = (int64_t)rnd(9);
        for (int i = 0; i < q.num; i++) q.demands[i] = 0;
        q.demands[rnd((unsigned)q.num)] = rnd(2) ? -1 : q.capacities[0] + 1;
    }
    struct lagom_rcpsp *p = opened(&q, &error);
    lr_close(p);
    return !p && error == EINVAL;
}

static bool is_legal(const struct project *q, const int32_t *starts, int makespan) {
    int end = 0;
    for (int i = 0; i < q->num; i++) {
        if (starts[i] < 0) return false;
        if (starts[i] + q->durations[i] > end) end = starts[i] + q->durations[i];
    }
    for (int a = 0; a < q->num_arcs; a++)
        if (starts[q->arcs[2 * a]] + q->durations[q->arcs[2 * a]] > starts[q->arcs[2 * a + 1]]) return false;
    for (int r = 0; r < q->num_resources; r++)
        for (int period = 0; period < end; period++) {
            int64_t left = q->capacities[r];
            for (int i = 0; i < q->num; i++)
                if (starts[i] <= period && period < starts[i] + q->durations[i]) {
                    left -= q->demands[i * q->num_resources + r];
                    if (left < 0) return false;
                }
        }
    return end == makespan;
}

int main(int argc, char **argv) {
    int num_projects = argc > 1 ? atoi(argv[1]) : 1000, error = 0;
    state = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    unsigned long wrong = 0;
    for (int k = 0; k < num_projects; k++) {
        struct project q = random_project();
        struct lagom_rcpsp *p = opened(&q, &error);
        if (!p) return fprintf(stderr, "project %d refused: %d\n", k, error), 1;
        int32_t starts[MOST], list[MOST];
        wrong += lr_best(p, starts) != -ENODATA;
        for (int i = 0; i < q.num; i++) list[i] = i;
        wrong += !is_legal(&q, starts, lr_place(p, 0, list, starts));
        wrong += !is_legal(&q, starts, lr_justify(p, list, starts));
        wrong += lr_add(p, starts) != 0;
        int makespan = lr_run(p, rnd(2) ? 0 : 10, 1 + (int64_t)rnd(3000), rnd(2) ? 0 : 20);
        wrong += lr_best(p, starts) != makespan || !is_legal(&q, starts, makespan);
        for (int i = 0; i < q.num; i++) list[i] = (int32_t)rnd((unsigned)q.num + 2) - 1; /* mostly no list */
        lr_place(p, (int)rnd(2), list, starts);
        lr_add(p, list);
        list[0] = p->horizon + 1;
        wrong += lr_add(p, list) != -EINVAL;
        lr_close(p);
        wrong += !is_refused(q);
    }
    printf("%d projects, %lu wrong\n", num_projects, wrong);
    return wrong != 0;
}
