/* Drives lagom_search_*.c under sanitizers: random groups, records, priors; every call of a search in its order, the answers
 * checked for what must always hold.
 *   stress_search [searches] [seed]
 */
#include "lagom_search.h"
#include <stdio.h>

static uint64_t state;

static double uniform(double low, double high) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return low + (high - low) * (double)(state >> 11) / 9007199254740992.0;
}

static int64_t whole(int64_t low, int64_t high) { return low + (int64_t)uniform(0, (double)(high - low + 1)); }

static double *reals(int64_t num, double low, double high) {
    double *array = malloc((size_t)num * sizeof *array);
    for (int64_t i = 0; i < num; i++) array[i] = uniform(low, high);
    return array;
}

static int64_t *wholes(int64_t num, int64_t low, int64_t high) {
    int64_t *array = malloc((size_t)num * sizeof *array);
    for (int64_t i = 0; i < num; i++) array[i] = whole(low, high);
    return array;
}

static void check(bool holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static struct ls_lattice make_lattice(int64_t num_places, int64_t num_kinds) {
    double *channels = reals(num_places, 1, 33), *chunks = reals(num_places, 15, 21), *at = reals(num_places, 0, 4);
    double *near = malloc((size_t)(num_places * num_places) * sizeof *near);
    double *steps = malloc((size_t)(num_places * num_places) * sizeof *steps);
    for (int64_t p = 0; p < num_places; p++) {
        channels[p] = floor(channels[p]);
        chunks[p] = exp2(chunks[p]);
        for (int64_t q = 0; q < num_places; q++) {
            double apart = (at[p] - at[q]) * (at[p] - at[q]);
            near[p * num_places + q] = exp(-0.5 * apart);
            steps[p * num_places + q] = exp(-fabs(channels[p] - channels[q]) / 5);
        }
    }
    free(at);
    return (struct ls_lattice){num_places, channels, chunks, wholes(num_places, 0, num_kinds - 1), near, steps};
}

static void free_all(const void *const *arrays, int num) {
    for (int i = 0; i < num; i++) free((void *)(uintptr_t)arrays[i]);
}

static void search(void) {
    int64_t n = whole(1, 12), m = n > 1 ? whole(1, 2) : 1, kinds = whole(1, 3), kernels = whole(1, 6), sms = whole(1, 3);
    int64_t runs = whole(1, 7), most = 0, num_params = NUM_SHARED + NUM_OF_KIND * (kinds - 1), space = 0, square = 0;
    struct ls_lattice lattices[2];
    for (int64_t i = 0; i < m; i++) {
        lattices[i] = make_lattice(whole(2, 60), kinds);
        most = lattices[i].num_places > most ? lattices[i].num_places : most;
    }
    int64_t *lattice_of = wholes(n, 0, m - 1);
    for (int64_t i = 0; i < m; i++) lattice_of[i] = i;
    struct ls_group group = {
        .num_comms = n, .num_lattices = m, .most_places = most, .num_kernels = kernels, .most_channels = 32,
        .knows_grid = whole(0, 1), .num_kinds = kinds, .lattices = lattices, .lattice_of = lattice_of,
        .wire_bytes = reals(n, 1e5, 1e8), .fluid = reals(sms * 33 * kernels, 1e-4, 1e-3),
        .whole = reals(sms * 33 * kernels, 1e-4, 1e-3), .intensity = reals(kernels, 0.1, 2), .curve_sd = 0.04,
        .collective_sd = 0.05, .spot_sd = 0.01, .body_sd = 0.02, .step_sd = 0.04 * (double)whole(0, 1),
    };
    int64_t *places = wholes(runs * n, 0, 0);
    for (int64_t row = 0; row < runs * n; row++) places[row] = whole(0, lattices[lattice_of[row % n]].num_places - 1);
    for (int64_t i = 0; i < m; i++) {
        int64_t room_of = lattices[i].num_places < runs * n ? lattices[i].num_places : runs * n;
        space += room_of, square += room_of * room_of;
    }
    struct ls_record record = {
        .num_runs = runs, .places = places, .comm_s = reals(runs * n, 1e-9, 1e-2), .comp_s = reals(runs, 1e-9, 1e-2),
        .num = reals(runs, 1, 9), .sigma = uniform(1e-3, 0.2), .num_seen = wholes(m, 0, 0), .seen = wholes(space, 0, 0),
        .index = wholes(runs * n, 0, 0), .precision = reals(space, 0, 0), .factor = reals(square, 0, 0),
    };
    struct ls_surrogate surrogate = {
        reals(m * most, 0, 0), reals(m * most, 0, 0), reals(n * most, 0, 0), reals(m * most * kernels, 0, 0),
        reals(kernels, 0, 0), reals(n * most, 0, 0), wholes(m * most, 0, 0), wholes(m, 0, 0),
    };
    double mean[NUM_SHARED + 3 * NUM_OF_KIND] = {23, 1.6, 12, -10, 0.3, -0.3, -2.3, 0.002};
    double body_mean[NUM_BODY] = {0, 0.9, -1.2, -1.6, 15.6, 0}, best;
    double *sd = reals(num_params, 0.1, 1), *body_sd = reals(NUM_BODY, 0.1, 1), *cost = reals(sms, 0, 0);
    double *params = reals(num_params, 0, 0), *body = reals(sms * NUM_BODY, 0, 0);
    double *covariance = reals(num_params * num_params + sms * NUM_BODY * NUM_BODY, 0, 0);
    int64_t *numbers = wholes(sms, 0, sms - 1), *found = wholes(n, 0, 0);
    uint8_t *excluded = calloc((size_t)(n * most), 1);
    memcpy(params, mean, (size_t)num_params * sizeof *params);
    for (int64_t s = 0; s < sms; s++) memcpy(body + s * NUM_BODY, body_mean, sizeof body_mean);
    for (int64_t i = 0; i < n * most; i++) excluded[i] = whole(0, 9) == 0;

    check(!ls_prepare(&group, &record), "prepare");
    check(!ls_fit_wire(&group, &record, mean, sd, 8, params, covariance, cost), "fit of the wire");
    check(isfinite(cost[0]) && covariance[0] > 0, "the wire's cost and variance");
    check(!ls_wires(&group, &record, params, &surrogate), "wires");
    check(!ls_fit_body(&group, &record, &surrogate, numbers, sms, body_mean, body_sd, 8, body, covariance, cost),
          "fit of the body");
    check(!ls_computations(&group, &record, numbers[0], body, &surrogate), "computations");
    check(!ls_best(&group, &surrogate, whole(0, 1) ? excluded : NULL, places, whole(0, runs), 0.03, found, &best),
          "best");
    if (isfinite(best)) {
        double comm_s, comp_s;
        for (int64_t j = 0; j < n; j++) {
            check(found[j] >= 0 && found[j] < lattices[lattice_of[j]].num_places, "a place that is none");
        }
        check(!ls_times(&group, &surrogate, found, 1, &comm_s, &comp_s), "times");
        check(fabs(rounded_max(comm_s, comp_s, 0.03) / best - 1) < 1e-9, "the best is not what it is said to be");
    }
    int64_t draws = whole(1, 4);
    double *alone = reals(kernels * draws, 0.1, 1), *lost = reals(runs * n * draws, 0, 0.8);
    double *moving = reals(runs * n * draws, 0.01, 2), *slower = reals(draws, 1, 1.4), *ended = reals(runs * draws, 0, 0);
    if (whole(0, 3) == 0) lost[0] = NAN;
    check(!ls_waiting(alone, kernels, lost, moving, slower, runs, n, draws, ended), "waiting");
    check(isnan(lost[0]) || ended[0] > alone[0], "a stream that ends before its first kernel");
    free_all((const void *const[]){alone, lost, moving, slower, ended}, 5);
    for (int64_t i = 0; i < m; i++) {
        free_all((const void *const[]){lattices[i].channels, lattices[i].chunk_bytes, lattices[i].kind,
                                       lattices[i].near, lattices[i].steps}, 5);
    }
    free_all((const void *const[]){lattice_of, group.wire_bytes, group.fluid, group.whole, group.intensity, places,
                                   record.comm_s, record.comp_s, record.num, record.num_seen, record.seen, record.index,
                                   record.precision, record.factor, surrogate.use, surrogate.pace, surrogate.comm_s,
                                   surrogate.under, surrogate.alone, surrogate.rest, surrogate.fronts, surrogate.num_front,
                                   sd, body_sd, cost, params, body, covariance, numbers, found, excluded}, 31);
}

int main(int argc, char **argv) {
    long num_searches = argc > 1 ? atol(argv[1]) : 1000;
    state = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    for (long i = 0; i < num_searches; i++) search();
    printf("%ld searches\n", num_searches);
    return 0;
}
