/* Drives lagom_workers.c under sanitizers: N ranks in one process over socket pairs, random collectives with random knobs,
 * several in flight, every answer checked, a broken connection at the end.
 *   stress_workers [collectives] [ranks] [seed]
 */
#include "lagom_workers.c"
#include <stdio.h>
#include <unistd.h>

enum { CHANNELS = 4, IN_FLIGHT = 3, MAX_PART = 4096 };

static uint64_t state;
static unsigned rnd(unsigned n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)((state >> 33) % n);
}

static float value(int rank, size_t i) { return (float)((31 * i + 7919 * (size_t)rank) % 8191); }

struct call {
    int kind, channels, wait;
    size_t num_elements, chunk;
};

struct rank {
    struct lagom_workers *engine;
    int rank, num_ranks, num_calls;
    const struct call *calls;
    unsigned long wrong, failed;
};

static unsigned long count_wrong(const struct rank *r, const struct call *c, const float *target) {
    int n = r->num_ranks;
    size_t part = c->num_elements / (size_t)n, wrong = 0;
    size_t length = c->kind == REDUCE_SCATTER ? part : c->num_elements;
    for (size_t i = 0; i < length; i++) {
        float want = 0;
        if (c->kind == ALL_GATHER) want = value((int)(i / part), i % part);
        if (c->kind == ALL_TO_ALL) want = value((int)(i / part), (size_t)r->rank * part + i % part);
        if (c->kind == REDUCE_SCATTER)
            for (int p = 0; p < n; p++) want += value(p, (size_t)r->rank * part + i);
        if (c->kind == ALL_REDUCE)
            for (int p = 0; p < n; p++) want += value(p, i);
        wrong += target[i] != want;
    }
    return wrong;
}

static void *live(void *argument) {
    struct rank *r = argument;
    size_t most = (size_t)MAX_PART * (size_t)r->num_ranks;
    float *source[IN_FLIGHT], *target[IN_FLIGHT];
    for (int i = 0; i < IN_FLIGHT; i++) {
        source[i] = malloc(most * sizeof(float));
        target[i] = malloc(most * sizeof(float));
    }
    for (int first = 0; first < r->num_calls; first += IN_FLIGHT) {
        int numbers[IN_FLIGHT], count = r->num_calls - first < IN_FLIGHT ? r->num_calls - first : IN_FLIGHT;
        for (int i = 0; i < count; i++) {
            const struct call *c = &r->calls[first + i];
            for (size_t k = 0; k < c->num_elements; k++) source[i][k] = value(r->rank, k);
            float *into = c->kind == ALL_REDUCE ? source[i] : target[i];
            numbers[i] = lw_start(r->engine, c->kind, source[i], into, c->num_elements, c->channels, c->chunk, c->wait);
        }
        for (int i = 0; i < count; i++) {
            const struct call *c = &r->calls[first + i];
            if (lw_wait(r->engine, numbers[i])) {
                r->failed++;
                continue;
            }
            r->wrong += count_wrong(r, c, c->kind == ALL_REDUCE ? source[i] : target[i]);
        }
    }
    for (int i = 0; i < IN_FLIGHT; i++) free(source[i]), free(target[i]);
    return NULL;
}

static void run_all(struct rank *ranks, int n) {
    pthread_t threads[MAX_RANKS];
    for (int r = 0; r < n; r++) pthread_create(&threads[r], NULL, live, &ranks[r]);
    for (int r = 0; r < n; r++) pthread_join(threads[r], NULL);
}

int main(int argc, char **argv) {
    int num_calls = argc > 1 ? atoi(argv[1]) : 2000, n = argc > 2 ? atoi(argv[2]) : 3;
    state = argc > 3 ? (uint64_t)atoi(argv[3]) : 1;
    struct call *calls = calloc((size_t)num_calls, sizeof *calls);
    for (int i = 0; i < num_calls; i++) {
        struct call *c = &calls[i];
        c->kind = (int)rnd(NUM_KINDS), c->channels = 1 + (int)rnd(CHANNELS), c->wait = (int)rnd(NUM_WAIT_MODES);
        c->num_elements = (1 + rnd(MAX_PART)) * (size_t)n;
        if (c->kind == ALL_REDUCE) c->num_elements -= rnd((unsigned)n);
        c->chunk = 1 + rnd(2 * MAX_PART);
        if (c->chunk < c->num_elements / 64) c->chunk = c->num_elements / 64;
    }
    int *sockets = malloc(sizeof(int) * CHANNELS * (size_t)(n * n));
    for (int i = 0; i < CHANNELS * n * n; i++) sockets[i] = -1;
    for (int a = 0; a < n; a++)
        for (int b = a + 1; b < n; b++)
            for (int c = 0; c < CHANNELS; c++) {
                int pair[2];
                if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) return 2;
                sockets[(a * CHANNELS + c) * n + b] = pair[0];
                sockets[(b * CHANNELS + c) * n + a] = pair[1];
            }
    struct rank *ranks = calloc((size_t)n, sizeof *ranks);
    for (int r = 0; r < n; r++)
        ranks[r] = (struct rank){lw_open(r, n, CHANNELS, sockets + r * CHANNELS * n), r, n, num_calls, calls, 0, 0};
    run_all(ranks, n);
    unsigned long wrong = 0, failed = 0, expected_to_fail = 0;
    for (int r = 0; r < n; r++) wrong += ranks[r].wrong, failed += ranks[r].failed;
    for (int i = 0; i < CHANNELS * n * n; i++)
        if (sockets[i] >= 0) shutdown(sockets[i], SHUT_RDWR);
    for (int r = 0; r < n; r++) ranks[r].num_calls = num_calls < 10 ? num_calls : 10, ranks[r].failed = 0;
    run_all(ranks, n);
    for (int r = 0; r < n; r++) expected_to_fail += ranks[r].failed;
    for (int r = 0; r < n; r++) lw_close(ranks[r].engine);
    for (int i = 0; i < CHANNELS * n * n; i++)
        if (sockets[i] >= 0) close(sockets[i]);
    free(sockets), free(ranks), free(calls);
    printf("%d collectives on %d ranks: %lu wrong elements, %lu failed; %lu failed after the cut\n", num_calls, n, wrong,
           failed, expected_to_fail);
    return wrong || failed || !expected_to_fail;
}
