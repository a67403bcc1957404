/* Surrogates of whole assignments: what the curve of the computations misses, and which places are candidates. */
#include "lagom_search.h"

static const double NEAR_FRONT = 1.004;

/* The computations' end if from collective j on all run at these places. */
static double finish_s(const struct outlook *o, struct progress now, const int64_t *places, int64_t j) {
    for (; j < o->num_comms && now.i < o->num_kernels; j++) {
        advance(&now, under_at(o, j, places[j]), comm_at(o, j, places[j]), o->num_kernels);
    }
    for (; now.i < o->num_kernels; now.i++, now.left = 1.0) now.time_s += now.left * o->surrogate->alone[now.i];
    return now.time_s;
}

static double total_comm_s(const struct outlook *o, const int64_t *places) {
    double sum = 0;
    for (int64_t j = 0; j < o->num_comms; j++) sum += comm_at(o, j, places[j]);
    return sum;
}

/* The logarithm of what the curve of the computations misses. */
static double total_rest(const struct outlook *o, const int64_t *places) {
    double sum = 0;
    for (int64_t j = 0; j < o->num_comms; j++) sum += rest_at(o, j, places[j]);
    return sum;
}

/* X and Y of assignments (num, num_comms). */
API int ls_times(const struct ls_group *group, const struct ls_surrogate *surrogate, const int64_t *places, int64_t num,
                 double *comm_s, double *comp_s) {
    struct outlook o = outlook_of(group, surrogate, 0.0);
    struct progress start = {0, 1.0, 0.0};
    for (int64_t a = 0; a < num; a++) {
        const int64_t *own = places + a * o.num_comms;
        comm_s[a] = total_comm_s(&o, own);
        comp_s[a] = finish_s(&o, start, own, 0) * exp(total_rest(&o, own));
    }
    return 0;
}

/* The covariance of what the curve of the computations misses, as logarithms: over collectives that take `shares` of
 * their time, a part common to all that is smooth over the places, and each one's own that follows the steps of its
 * channels. */
struct covariance {
    const struct ls_group *group;
    const double *shares;
    double common, own;
};

/* Shares of all communication: what the curve misses does not vanish where communication is short. The own parts are as
 * large in sum however many collectives there are: few kernels during each. */
static struct covariance covariance_of(const struct ls_group *group, const struct ls_record *record, double *shares) {
    double squares = 0;
    memset(shares, 0, (size_t)group->num_comms * sizeof *shares);
    for (int64_t d = 0; d < record->num_runs; d++) {
        const double *comm_s = record->comm_s + d * group->num_comms;
        double all_s = sum_of(comm_s, group->num_comms) * (double)record->num_runs;
        for (int64_t j = 0; j < group->num_comms; j++) shares[j] += comm_s[j] / all_s;
    }
    for (int64_t j = 0; j < group->num_comms; j++) squares += shares[j] * shares[j];
    return (struct covariance){group, shares, group->body_sd * group->body_sd,
                               group->step_sd * group->step_sd / squares};
}

/* At two assignments. */
static double covariance(const struct covariance *c, const int64_t *a, const int64_t *b) {
    const struct ls_group *group = c->group;
    double sum = 0;
    for (int64_t i = 0; i < group->num_comms; i++) {
        const struct ls_lattice *lattice = &group->lattices[group->lattice_of[i]];
        const double *near = lattice->near + a[i] * lattice->num_places;
        double common = 0, own = c->shares[i] * lattice->steps[a[i] * lattice->num_places + b[i]];
        for (int64_t j = 0; j < group->num_comms; j++) {
            if (group->lattice_of[j] == group->lattice_of[i]) common += c->shares[j] * near[b[j]];
        }
        sum += c->shares[i] * (c->common * common + c->own * own);
    }
    return sum;
}

/* What each place of each collective adds, from the weights of the runs; `common` has room for a lattice. */
static void spread_rest(const struct covariance *c, const struct ls_record *record, const double *weights,
                        double *common, struct ls_surrogate *surrogate) {
    const struct ls_group *group = c->group;
    int64_t n = group->num_comms;
    for (int64_t m = 0; m < group->num_lattices; m++) {
        const struct ls_lattice *lattice = &group->lattices[m];
        int64_t num_places = lattice->num_places;
        memset(common, 0, (size_t)num_places * sizeof *common);
        for (int64_t row = 0; row < record->num_runs * n; row++) {
            if (group->lattice_of[row % n] != m) continue;
            const double *near = lattice->near + record->places[row] * num_places;
            double weight = c->common * weights[row / n] * c->shares[row % n];
            for (int64_t p = 0; p < num_places; p++) common[p] += weight * near[p];
        }
        for (int64_t j = 0; j < n; j++) {
            if (group->lattice_of[j] != m) continue;
            double *rest = surrogate->rest + j * group->most_places;
            memcpy(rest, common, (size_t)num_places * sizeof *rest);
            for (int64_t d = 0; d < record->num_runs && c->own > 0; d++) {
                const double *steps = lattice->steps + record->places[d * n + j] * num_places;
                double weight = c->own * weights[d] * c->shares[j];
                for (int64_t p = 0; p < num_places; p++) rest[p] += weight * steps[p];
            }
            for (int64_t p = 0; p < num_places; p++) rest[p] *= c->shares[j];
        }
    }
}

/* What the curve of the computations misses, from what it missed where it was measured. */
static int find_rest(const struct ls_group *group, const struct ls_record *record, struct ls_surrogate *surrogate) {
    struct outlook o = outlook_of(group, surrogate, 0.0);
    struct progress start = {0, 1.0, 0.0};
    int64_t n = group->num_comms, runs = record->num_runs;
    double *cover = malloc((size_t)(runs * runs + runs + n + group->most_places) * sizeof *cover);
    if (!cover) return -1;
    double *weights = cover + runs * runs, *shares = weights + runs, *common = shares + n;
    struct covariance c = covariance_of(group, record, shares);
    for (int64_t d = 0; d < runs; d++) {
        const int64_t *places = record->places + d * n;
        for (int64_t e = 0; e <= d; e++) cover[d * runs + e] = covariance(&c, places, record->places + e * n);
        cover[d * runs + d] += variance_of(record, d);
        weights[d] = log(record->comp_s[d] / finish_s(&o, start, places, 0));
    }
    factorise(cover, runs);
    solve(cover, runs, weights);
    spread_rest(&c, record, weights, common, surrogate);
    free(cover);
    return 0;
}

struct ranked {
    double speed, harm;
    int64_t place;
};

static int by_speed(const void *a, const void *b) {
    const struct ranked *x = a, *y = b;
    if (x->speed != y->speed) return x->speed < y->speed ? -1 : 1;
    if (x->harm != y->harm) return x->harm < y->harm ? -1 : 1;
    return (x->place > y->place) - (x->place < y->place);
}

/* The places that no other beats in speed and in harmlessness, nearly; the fastest first. */
static int find_fronts(const struct ls_group *group, struct ls_surrogate *surrogate) {
    struct ranked *ranked = malloc((size_t)group->most_places * sizeof *ranked);
    if (!ranked) return -1;
    for (int64_t m = 0; m < group->num_lattices; m++) {
        int64_t first = 0, num_places = group->lattices[m].num_places, num = 0;
        while (group->lattice_of[first] != m) first++;
        for (int64_t p = 0; p < num_places; p++) {
            const double *under = surrogate->under + (m * group->most_places + p) * group->num_kernels;
            ranked[p] = (struct ranked){surrogate->comm_s[first * group->most_places + p],
                                        sum_of(under, group->num_kernels), p};
        }
        qsort(ranked, (size_t)num_places, sizeof *ranked, by_speed);
        double least = INFINITY;
        int64_t *front = surrogate->fronts + m * group->most_places;
        for (int64_t p = 0; p < num_places; p++) {
            if (ranked[p].harm <= least * NEAR_FRONT) front[num++] = ranked[p].place;
            least = smaller(least, ranked[p].harm);
        }
        surrogate->num_front[m] = num;
    }
    free(ranked);
    return 0;
}

/* The rest of a surrogate whose wires are known (`ls_wires`): the computations under one SM count and its constants, what
 * their curve misses, and the candidates. */
API int ls_computations(const struct ls_group *group, const struct ls_record *record, int64_t sm, const double *params,
                        struct ls_surrogate *surrogate) {
    draw_kernels(group, sm, params, surrogate);
    if (find_rest(group, record, surrogate)) return -1;
    return find_fronts(group, surrogate);
}
