/* The best assignment on a surrogate (allocate.py). */
#include "lagom_search.h"

enum { NUM_TRADED = 5, MOST_PAIRS = 4096, NEAR = 8 };
static const double LEAST_STEP = 1e-6;

/* Candidates of every collective, the fastest first: numbers [starts[j], starts[j + 1]) are collective j's. What the
 * search reads of each lies together: its place, its x, what it adds to the rest, T (num_kernels). */
struct candidates {
    int64_t *places, *starts;
    double *comm_s, *rest, *under;
};

static void sort_by_speed(const struct outlook *o, int64_t j, int64_t *places, int64_t num) {
    for (int64_t a = 1; a < num; a++) { /* nearly sorted already */
        int64_t place = places[a], b = a;
        double speed = comm_at(o, j, place);
        for (; b > 0 && comm_at(o, j, places[b - 1]) > speed; b--) places[b] = places[b - 1];
        places[b] = place;
    }
}

/* Also where a collective has none; what is not allowed but begun with gets a number of its own by `number_of`. */
static int open_candidates(const struct outlook *o, const uint8_t *excluded, struct candidates *c) {
    int64_t n = o->num_comms, most = 0;
    for (int64_t j = 0; j < n; j++) most += o->surrogate->num_front[o->group->lattice_of[j]] + 1;
    c->places = malloc((size_t)(most + n + 1) * sizeof *c->places);
    c->comm_s = malloc((size_t)(most * (2 + o->num_kernels)) * sizeof *c->comm_s);
    if (!c->places || !c->comm_s) return -1;
    c->starts = c->places + most;
    c->rest = c->comm_s + most;
    c->under = c->rest + most;
    c->starts[0] = 0;
    for (int64_t j = 0; j < n; j++) {
        int64_t m = o->group->lattice_of[j], *places = c->places + c->starts[j], num = 0;
        for (int64_t a = 0; a < o->surrogate->num_front[m]; a++) {
            int64_t place = o->surrogate->fronts[m * o->most + a];
            if (!excluded || !excluded[j * o->most + place]) places[num++] = place;
        }
        sort_by_speed(o, j, places, num);
        places[num++] = -1; /* room for a start that is no candidate */
        c->starts[j + 1] = c->starts[j] + num;
    }
    return 0;
}

static void describe(const struct outlook *o, const struct candidates *c, int64_t j, int64_t number) {
    int64_t place = c->places[number];
    c->comm_s[number] = comm_at(o, j, place);
    c->rest[number] = rest_at(o, j, place);
    memcpy(c->under + number * o->num_kernels, under_at(o, j, place), (size_t)o->num_kernels * sizeof *c->under);
}

/* How many candidates collective j has; the number behind them is the start's. */
static int64_t end_of(const struct candidates *c, int64_t j) { return c->starts[j + 1] - 1; }

static int64_t number_of(const struct outlook *o, const struct candidates *c, int64_t j, int64_t place) {
    for (int64_t a = c->starts[j]; a < end_of(c, j); a++) {
        if (c->places[a] == place) return a;
    }
    c->places[end_of(c, j)] = place;
    describe(o, c, j, end_of(c, j));
    return end_of(c, j);
}

/* The computations' progress before collective `end`, if those before it run as chosen. */
static struct progress before(const struct outlook *o, const struct candidates *c, const int64_t *chosen, int64_t end) {
    struct progress now = {0, 1.0, 0.0};
    for (int64_t j = 0; j < end && now.i < o->num_kernels; j++) {
        advance(&now, c->under + chosen[j] * o->num_kernels, c->comm_s[chosen[j]], o->num_kernels);
    }
    return now;
}

static double end_s(const struct outlook *o, const struct candidates *c, struct progress now, const int64_t *chosen,
                    int64_t j) {
    for (; j < o->num_comms && now.i < o->num_kernels; j++) {
        advance(&now, c->under + chosen[j] * o->num_kernels, c->comm_s[chosen[j]], o->num_kernels);
    }
    for (; now.i < o->num_kernels; now.i++, now.left = 1.0) now.time_s += now.left * o->surrogate->alone[now.i];
    return now.time_s;
}

/* The sum of all x, and of the rest, collectives i and j left out (-1: none). */
struct others {
    double comm_s, rest;
};

static struct others without(const struct outlook *o, const struct candidates *c, const int64_t *chosen, int64_t i,
                             int64_t j) {
    struct others sum = {0, 0};
    for (int64_t k = 0; k < o->num_comms; k++) {
        if (k == i || k == j) continue;
        sum.comm_s += c->comm_s[chosen[k]];
        sum.rest += c->rest[chosen[k]];
    }
    return sum;
}

static double chosen_s(const struct outlook *o, const struct candidates *c, const int64_t *chosen) {
    struct progress start = {0, 1.0, 0.0};
    struct others all = without(o, c, chosen, -1, -1);
    return rounded_max(all.comm_s, end_s(o, c, start, chosen, 0) * exp(all.rest), o->doubt);
}

/* Collective j at each of its candidates, all others as they are; true if a shorter makespan was found. */
static bool vary(const struct outlook *o, const struct candidates *c, int64_t *chosen, int64_t j, double *best) {
    struct progress start = before(o, c, chosen, j);
    struct others others = without(o, c, chosen, j, -1);
    double shortest = *best;
    int64_t kept = chosen[j], found = -1;
    for (int64_t a = c->starts[j]; a < end_of(c, j); a++) {
        double comm_s = others.comm_s + c->comm_s[a];
        if (comm_s >= shortest) break; /* and so are all slower ones */
        chosen[j] = a;
        double makespan = rounded_max(comm_s, end_s(o, c, start, chosen, j) * exp(others.rest + c->rest[a]), o->doubt);
        if (makespan < shortest) shortest = makespan, found = a;
    }
    chosen[j] = kept;
    if (found < 0 || !(shortest < *best * (1 - LEAST_STEP))) return false;
    chosen[j] = found;
    *best = shortest;
    return true;
}

/* Up to NUM_TRADED candidates of collective j about the speed of the chosen one: the first, and behind the last. */
static void near_in_speed(const struct candidates *c, int64_t j, int64_t chosen, int64_t *from, int64_t *to) {
    int64_t begin = c->starts[j], end = end_of(c, j), at = begin;
    while (at < end && c->comm_s[at] < c->comm_s[chosen]) at++;
    *from = at - NUM_TRADED / 2 < begin ? begin : at - NUM_TRADED / 2;
    *to = at + NUM_TRADED / 2 + 1 > end ? end : at + NUM_TRADED / 2 + 1;
}

/* The best move of two collectives at once, a few places in speed; true if it shortens the makespan. */
static bool trade(const struct outlook *o, const struct candidates *c, int64_t *chosen, double *best) {
    int64_t n = o->num_comms, found[4] = {-1, -1, -1, -1}, from_i, to_i, from_j, to_j;
    double shortest = *best;
    for (int64_t i = 0; i < n; i++) {
        struct progress start = before(o, c, chosen, i);
        near_in_speed(c, i, chosen[i], &from_i, &to_i);
        for (int64_t j = i + 1; j < n && (n <= NEAR || j == i + 1); j++) {
            int64_t kept_i = chosen[i], kept_j = chosen[j];
            struct others others = without(o, c, chosen, i, j);
            near_in_speed(c, j, kept_j, &from_j, &to_j);
            for (int64_t a = from_i; a < to_i; a++) {
                for (int64_t b = from_j; b < to_j; b++) {
                    double comm_s = others.comm_s + c->comm_s[a] + c->comm_s[b];
                    if (comm_s >= shortest) break;
                    double rest = others.rest + c->rest[a] + c->rest[b];
                    chosen[i] = a, chosen[j] = b;
                    double makespan = rounded_max(comm_s, end_s(o, c, start, chosen, i) * exp(rest), o->doubt);
                    if (makespan < shortest) {
                        shortest = makespan;
                        found[0] = i, found[1] = j, found[2] = a, found[3] = b;
                    }
                }
            }
            chosen[i] = kept_i, chosen[j] = kept_j;
        }
    }
    if (found[0] < 0 || !(shortest < *best * (1 - LEAST_STEP))) return false;
    chosen[found[0]] = found[2];
    chosen[found[1]] = found[3];
    *best = shortest;
    return true;
}

static double descend(const struct outlook *o, const struct candidates *c, int64_t *chosen) {
    double best = chosen_s(o, c, chosen);
    int64_t since = 0, j = 0;
    while (since < o->num_comms) {
        since = vary(o, c, chosen, j, &best) ? 1 : since + 1;
        j = (j + 1) % o->num_comms;
        if (since == o->num_comms && trade(o, c, chosen, &best)) since = 0;
    }
    return best;
}

static double all_pairs(const struct outlook *o, const struct candidates *c, int64_t *chosen) {
    double best = INFINITY;
    int64_t tried[2];
    for (tried[0] = c->starts[0]; tried[0] < end_of(c, 0); tried[0]++) {
        for (tried[1] = c->starts[1]; tried[1] < end_of(c, 1); tried[1]++) {
            if (c->comm_s[tried[0]] + c->comm_s[tried[1]] >= best) break;
            double makespan = chosen_s(o, c, tried);
            if (makespan < best) best = makespan, memcpy(chosen, tried, sizeof tried);
        }
    }
    return best;
}

/* The best place that is a candidate of all collectives of one lattice, for all of them; infinite if there is none. */
static double best_equal(const struct outlook *o, const struct candidates *c, int64_t *chosen, int64_t *tried) {
    double best = INFINITY;
    for (int64_t a = 0; o->group->num_lattices == 1 && a < o->surrogate->num_front[0]; a++) {
        int64_t place = o->surrogate->fronts[a];
        bool is_allowed = true;
        for (int64_t j = 0; j < o->num_comms && is_allowed; j++) {
            int64_t number = c->starts[j] + a; /* where it is unless the order of speed differs or places are excluded */
            if (number >= end_of(c, j) || c->places[number] != place) {
                for (number = c->starts[j]; number < end_of(c, j) && c->places[number] != place; number++) continue;
            }
            tried[j] = number;
            is_allowed = number < end_of(c, j);
        }
        if (!is_allowed) continue;
        double makespan = chosen_s(o, c, tried);
        if (makespan < best) best = makespan, memcpy(chosen, tried, (size_t)o->num_comms * sizeof *chosen);
    }
    return best;
}

/* Where the expected makespan is shortest: searched from the starts (num_starts, num_comms) and from the best equal
 * places. excluded (num_comms, most_places) may be NULL. *best is infinite where there is nothing to start from. */
API int ls_best(const struct ls_group *group, const struct ls_surrogate *surrogate, const uint8_t *excluded,
                const int64_t *starts, int64_t num_starts, double doubt, int64_t *places, double *best) {
    struct outlook o = outlook_of(group, surrogate, doubt);
    struct candidates c = {.places = NULL, .comm_s = NULL};
    int64_t n = o.num_comms, *chosen = malloc((size_t)(2 * n) * sizeof *chosen);
    int status = chosen && !open_candidates(&o, excluded, &c) ? 0 : -1;
    *best = INFINITY;
    if (!status) {
        for (int64_t j = 0; j < n; j++) {
            for (int64_t a = c.starts[j]; a < end_of(&c, j); a++) describe(&o, &c, j, a);
        }
        int64_t num_pairs = n == 2 ? end_of(&c, 0) * (end_of(&c, 1) - c.starts[1]) : 0;
        if (num_pairs > 0 && num_pairs <= MOST_PAIRS) {
            *best = all_pairs(&o, &c, chosen);
            for (int64_t j = 0; j < n; j++) places[j] = c.places[chosen[j]];
        } else {
            for (int64_t s = 0; s <= num_starts; s++) {
                if (s == num_starts && !isfinite(best_equal(&o, &c, chosen, chosen + n))) continue;
                for (int64_t j = 0; s < num_starts && j < n; j++) chosen[j] = number_of(&o, &c, j, starts[s * n + j]);
                double makespan = descend(&o, &c, chosen);
                if (makespan >= *best) continue;
                *best = makespan;
                for (int64_t j = 0; j < n; j++) places[j] = c.places[chosen[j]];
            }
        }
    }
    free(chosen);
    free(c.places);
    free(c.comm_s);
    return status;
}
