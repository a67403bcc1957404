/* Random task graphs through liblagom_list_schedule, on two threads at once: every schedule is checked against its graph.
 *   stress_list_schedule [graphs] [seed]
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <pthread.h>
#include <stdio.h>

#include "lagom_list_schedule.c"
#undef API
#include "lagom_two_chains.c"
#undef API
#include "lagom_window_search.c"

enum { MAX_TASKS = 400, MAX_RESOURCES = 4, MAX_ARCS = 3 };

struct problem {
    struct lls_graph graph;
    int64_t ticks[MAX_TASKS];
    int32_t resource[MAX_TASKS], pred_begin[MAX_TASKS + 1], succ_begin[MAX_TASKS + 1];
    int32_t preds[MAX_TASKS * MAX_ARCS], succs[MAX_TASKS * MAX_ARCS];
};

static int num_graphs = 300;
static uint64_t first_seed = 1;

static void make_problem(struct problem *p, uint64_t *random) {
    int32_t num = 1 + (int32_t)random_below(random, MAX_TASKS), arcs = 0;
    p->graph = (struct lls_graph){num, 1 + random_below(random, MAX_RESOURCES), p->ticks, p->resource,
                                  p->pred_begin, p->preds, p->succ_begin, p->succs};
    for (int32_t i = 0; i < num; i++) {
        p->ticks[i] = 1 + random_below(random, 50);
        p->resource[i] = (int32_t)random_below(random, p->graph.num_resources);
        p->pred_begin[i] = arcs;
        int32_t before = -1; /* rising, so that no arc comes twice */
        for (int k = 0; k < MAX_ARCS && before + 1 < i; k++) {
            if (random_below(random, 2)) continue;
            before += 1 + (int32_t)random_below(random, i - before - 1);
            p->preds[arcs++] = before;
        }
    }
    p->pred_begin[num] = arcs;
    int32_t place = 0;
    for (int32_t i = 0; i < num; i++) {
        p->succ_begin[i] = place;
        for (int32_t j = i + 1; j < num; j++)
            for (int32_t k = p->pred_begin[j]; k < p->pred_begin[j + 1]; k++)
                if (p->preds[k] == i) p->succs[place++] = j;
    }
    p->succ_begin[num] = place;
}

/* The makespan; 0 if an arc is broken or two tasks of a resource overlap. */
static int64_t checked(const struct problem *p, const int64_t *starts) {
    int64_t makespan = 0;
    for (int32_t i = 0; i < p->graph.num_tasks; i++) {
        int64_t end = starts[i] + p->ticks[i];
        if (starts[i] < 0) return 0;
        for (int32_t k = p->pred_begin[i]; k < p->pred_begin[i + 1]; k++)
            if (starts[p->preds[k]] + p->ticks[p->preds[k]] > starts[i]) return 0;
        for (int32_t j = 0; j < i; j++)
            if (p->resource[i] == p->resource[j] && starts[i] < starts[j] + p->ticks[j] && starts[j] < end) return 0;
        if (end > makespan) makespan = end;
    }
    return makespan;
}

static int by_start(const void *a, const void *b, const int64_t *starts) {
    int64_t left = starts[*(const int32_t *)a], right = starts[*(const int32_t *)b];
    return (left > right) - (left < right);
}

static bool is_sound(struct problem *p, uint64_t *random) {
    int64_t num = p->graph.num_tasks, starts[MAX_TASKS], idle[MAX_RESOURCES];
    double priority[MAX_TASKS];
    int32_t order[MAX_TASKS];
    for (int64_t i = 0; i < num; i++) priority[i] = (double)random_below(random, 100) - 50.0;
    int64_t made = lls_generate(&p->graph, (int)random_below(random, 2), priority, starts);
    if (made <= 0 || checked(p, starts) != made) return false;
    int64_t max_steps = random_below(random, 20 * num), steps = max_steps;
    int64_t better =
        lls_improve(&p->graph, (int)random_below(random, 2), (int)random_below(random, 2), 5, 2, 0, 1e9, &steps, starts);
    if (steps >= max_steps + 2 * num) return false;
    if (better <= 0 || better > made || checked(p, starts) != better) return false;
    for (int64_t i = 0; i < num; i++) order[i] = (int32_t)i;
    for (int64_t i = 1; i < num; i++) { /* by start */
        int32_t task = order[i];
        int64_t k = i;
        for (; k > 0 && by_start(&order[k - 1], &task, starts) > 0; k--) order[k] = order[k - 1];
        order[k] = task;
    }
    atomic_int stop = random_below(random, 20) == 0;
    int32_t size = 2 + (int32_t)random_below(random, 100);
    for (int k = 0; k < 3; k++) {
        steps = random_below(random, 2) ? INT64_MAX : random_below(random, 100 * num);
        int64_t swept = lls_sweep(&p->graph, size, 1 + k * (size - 1) / 2, 30, next_random(random), 1e9, &steps, &stop,
                                  order, starts);
        if (swept <= 0 || swept > better || checked(p, starts) != swept) return false;
        better = swept;
    }
    return lls_two_chains(num, p->ticks, p->resource, (num + 1) / 2, p->ticks, p->resource, p->graph.num_resources,
                          idle) > 0;
}

static void *run(void *number) {
    uint64_t random = first_seed + (uint64_t)(intptr_t)number;
    struct problem *p = malloc(sizeof *p);
    intptr_t failed = !p;
    for (int k = 0; p && k < num_graphs; k++) {
        make_problem(p, &random);
        if (!is_sound(p, &random)) failed++;
    }
    free(p);
    return (void *)failed;
}

int main(int argc, char **argv) {
    if (argc > 1) num_graphs = atoi(argv[1]);
    if (argc > 2) first_seed = (uint64_t)atoll(argv[2]);
    pthread_t threads[2];
    intptr_t failed = 0;
    for (intptr_t k = 0; k < 2; k++)
        if (pthread_create(&threads[k], NULL, run, (void *)k)) return 2;
    for (int k = 0; k < 2; k++) {
        void *result;
        pthread_join(threads[k], &result);
        failed += (intptr_t)result;
    }
    printf("%d graphs on 2 threads, %d unsound\n", num_graphs, (int)failed);
    return failed ? 1 : 0;
}
