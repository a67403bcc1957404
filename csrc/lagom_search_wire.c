/* How long a collective takes alone (wire.py says why so). */
#include "lagom_search.h"

enum { LINK, SATURATE, HALF, LATENCY, SHARP, POWER, FILL, PENALTY }; /* the shared constants of the wire */

/* The constants of one implementation, exponentials taken. */
struct kind {
    double link, saturate, half, wait_s;
};

struct wire {
    double sharp, power, fill, penalty;
    struct kind *kinds;
};

static int open_wire(struct wire *wire, const double *params, int64_t num_kinds) {
    static const double none[NUM_OF_KIND];
    wire->sharp = exp(params[SHARP]);
    wire->power = exp(params[POWER]);
    wire->fill = exp(params[FILL]);
    wire->penalty = params[PENALTY];
    wire->kinds = malloc((size_t)num_kinds * sizeof *wire->kinds);
    if (!wire->kinds) return -1;
    for (int64_t k = 0; k < num_kinds; k++) {
        const double *own = k ? params + NUM_SHARED + NUM_OF_KIND * (k - 1) : none;
        wire->kinds[k] = (struct kind){
            .link = params[LINK] + own[0],
            .saturate = params[SATURATE] + own[0] - own[1],
            .half = exp(params[HALF] + own[2]),
            .wait_s = exp(params[LATENCY] + own[3]),
        };
    }
    return 0;
}

/* ln R at a place; what its derivatives are made of, where wanted. */
struct rate_parts {
    double filling, soft, missing, per_chunk, half_share;
};

static double log_rate(const struct wire *wire, const struct kind *kind, double channels, double chunk_bytes,
                       struct rate_parts *parts) {
    double relative = kind->half / chunk_bytes;
    double per_chunk = wire->power * log1p(relative);
    double filling = wire->sharp * (log(channels) - kind->saturate - per_chunk);
    double rest = exp(-fabs(filling)), soft = log1p(rest) + larger(-filling, 0.0);
    if (parts) {
        double missing = filling > 0 ? rest / (1 + rest) : 1 / (1 + rest);
        *parts = (struct rate_parts){filling, soft, missing, per_chunk, relative / (1 + relative)};
    }
    return kind->link - soft / wire->sharp - wire->penalty * channels;
}

struct wire_model {
    const struct ls_group *group;
    const struct ls_record *record;
};

static void predict_wire(const void *model, const double *params, double *values, double *jacobian) {
    const struct ls_group *group = ((const struct wire_model *)model)->group;
    const struct ls_record *record = ((const struct wire_model *)model)->record;
    int64_t num_rows = record->num_runs * group->num_comms;
    int64_t num_params = NUM_SHARED + NUM_OF_KIND * (group->num_kinds - 1);
    struct wire wire;
    if (open_wire(&wire, params, group->num_kinds)) {
        for (int64_t row = 0; row < num_rows; row++) values[row] = NAN;
        if (jacobian) memset(jacobian, 0, (size_t)(num_rows * num_params) * sizeof *jacobian);
        return;
    }
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t j = row % group->num_comms, place = record->places[row];
        const struct ls_lattice *lattice = &group->lattices[group->lattice_of[j]];
        int64_t number = lattice->kind[place];
        const struct kind *kind = &wire.kinds[number];
        double channels = lattice->channels[place], chunk = lattice->chunk_bytes[place], bytes = group->wire_bytes[j];
        struct rate_parts parts;
        double inverse = exp(-log_rate(&wire, kind, channels, chunk, jacobian ? &parts : NULL));
        double first = wire.fill * smaller(bytes, channels * chunk);
        double moved = (bytes + first) * inverse, time_s = kind->wait_s + moved;
        values[row] = log(time_s);
        if (!jacobian) continue;
        double *slope = jacobian + row * num_params, down = -moved / time_s; /* d ln x / d ln R */
        memset(slope, 0, (size_t)num_params * sizeof *slope);
        slope[LINK] = down;
        slope[SATURATE] = -down * parts.missing;
        slope[HALF] = -down * parts.missing * wire.power * parts.half_share;
        slope[LATENCY] = kind->wait_s / time_s;
        slope[SHARP] = down * (parts.soft + parts.missing * parts.filling) / wire.sharp;
        slope[POWER] = -down * parts.missing * parts.per_chunk;
        slope[FILL] = first * inverse / time_s;
        slope[PENALTY] = -down * channels;
        if (number) {
            double *own = slope + NUM_SHARED + NUM_OF_KIND * (number - 1);
            own[0] = slope[LINK] + slope[SATURATE];
            own[1] = -slope[SATURATE];
            own[2] = slope[HALF];
            own[3] = slope[LATENCY];
        }
    }
    free(wire.kinds);
}

API int ls_version(void) { return LS_VERSION; }

/* The wire's constants from all collectives' times; params holds the start. */
API int ls_fit_wire(const struct ls_group *group, const struct ls_record *record, const double *mean,
                    const double *prior_sd, int64_t num_steps, double *params, double *covariance, double *cost) {
    int64_t rows = record->num_runs * group->num_comms, n = NUM_SHARED + NUM_OF_KIND * (group->num_kinds - 1);
    double *scratch = fit_scratch(rows, n), *observed = malloc((size_t)(2 * rows) * sizeof *observed);
    if (scratch && observed) {
        double *sd = observed + rows;
        for (int64_t row = 0; row < rows; row++) {
            observed[row] = log(record->comm_s[row]);
            sd[row] = sqrt(record->sigma * record->sigma / record->num[row / group->num_comms] +
                           group->curve_sd * group->curve_sd / 2);
        }
        struct wire_model model = {group, record};
        struct problem problem = {rows, n, observed, sd, mean, prior_sd, &model, predict_wire};
        fit(&problem, num_steps, params, covariance, cost, scratch);
    }
    int status = scratch && observed ? 0 : -1;
    free(scratch);
    free(observed);
    return status;
}

static void curves(const struct ls_group *group, const struct wire *wire, struct ls_surrogate *surrogate) {
    int64_t most = group->most_places;
    for (int64_t m = 0; m < group->num_lattices; m++) {
        const struct ls_lattice *lattice = &group->lattices[m];
        double *rate = surrogate->use + m * most, *pace = surrogate->pace + m * most, largest = 0, fastest = 0;
        for (int64_t p = 0; p < lattice->num_places; p++) {
            const struct kind *kind = &wire->kinds[lattice->kind[p]];
            rate[p] = exp(log_rate(wire, kind, lattice->channels[p], lattice->chunk_bytes[p], NULL));
            pace[p] = rate[p] / lattice->chunk_bytes[p];
            largest = larger(largest, rate[p]);
            fastest = larger(fastest, pace[p]);
        }
        for (int64_t j = 0; j < group->num_comms; j++) {
            if (group->lattice_of[j] != m) continue;
            double *comm_s = surrogate->comm_s + j * most, bytes = group->wire_bytes[j];
            for (int64_t p = 0; p < lattice->num_places; p++) {
                double first = wire->fill * smaller(bytes, lattice->channels[p] * lattice->chunk_bytes[p]);
                comm_s[p] = wire->kinds[lattice->kind[p]].wait_s + (bytes + first) / rate[p];
            }
        }
        for (int64_t p = 0; p < lattice->num_places; p++) rate[p] /= largest, pace[p] /= fastest;
    }
}

int draw_wires(const struct ls_group *group, const double *params, struct ls_surrogate *surrogate) {
    struct wire wire;
    if (open_wire(&wire, params, group->num_kinds)) return -1;
    curves(group, &wire, surrogate);
    free(wire.kinds);
    return 0;
}
