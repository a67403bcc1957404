/* How long the computations take during collectives (tuners/machine/group_model.py says why so). */
#include "lagom_search.h"

enum { SCALE, SHARE, PRESSURE, POLLUTION, HALF_FLIGHT, TOLL }; /* the constants of the computations */
static const double SHIFT = 1e-4;

/* The constants of the computations, exponentials taken; waves of one SM count. */
struct body {
    double scale, mix, pressure, pollution, half, toll;
    const double *fluid, *whole, *intensity;
    int64_t num_kernels;
    bool knows_grid;
};

static struct body body_of(const struct ls_group *group, int64_t sm, const double *params) {
    int64_t table = (group->most_channels + 1) * group->num_kernels;
    double share = params[SHARE];
    return (struct body){
        .scale = exp(params[SCALE]),
        .mix = group->knows_grid ? larger(0.0, smaller(1.0, share)) : exp(share),
        .pressure = exp(params[PRESSURE]),
        .pollution = exp(params[POLLUTION]),
        .half = exp(params[HALF_FLIGHT]),
        .toll = larger(0.0, params[TOLL]),
        .fluid = group->fluid + sm * table,
        .whole = group->whole + sm * table,
        .intensity = group->intensity,
        .num_kernels = group->num_kernels,
        .knows_grid = group->knows_grid != 0,
    };
}

/* Kernel i with that many channels taken away, with nothing concurrent. */
static double solo_s(const struct body *body, int64_t channels, int64_t i) {
    int64_t at = channels * body->num_kernels + i;
    double waves = body->knows_grid ? body->fluid[at] * (1 - body->mix) + body->whole[at] * body->mix
                                    : 1 + body->mix * body->fluid[at];
    return body->scale * waves;
}

/* What a collective takes: its channels, pressure on memory, pollution of the cache. */
struct taken {
    int64_t channels;
    double pressed, rest;
};

static struct taken taken_by(const struct ls_group *group, const struct ls_surrogate *surrogate, const struct body *body,
                               int64_t m, int64_t place) {
    const struct ls_lattice *lattice = &group->lattices[m];
    double channels = lattice->channels[place], flight = channels * lattice->chunk_bytes[place];
    double use = surrogate->use[m * group->most_places + place], pace = surrogate->pace[m * group->most_places + place];
    return (struct taken){(int64_t)channels, body->pressure * use / (2 - use),
                           body->pollution * flight / (flight + body->half) + body->toll * pace};
}

static double kernel_s(const struct body *body, const struct taken *taken, int64_t i) {
    return solo_s(body, taken->channels, i) * (1 + taken->pressed * body->intensity[i] + taken->rest);
}

void draw_kernels(const struct ls_group *group, int64_t sm, const double *params, struct ls_surrogate *surrogate) {
    struct body body = body_of(group, sm, params);
    int64_t num_kernels = group->num_kernels;
    for (int64_t i = 0; i < num_kernels; i++) surrogate->alone[i] = solo_s(&body, 0, i);
    for (int64_t m = 0; m < group->num_lattices; m++) {
        const struct ls_lattice *lattice = &group->lattices[m];
        for (int64_t p = 0; p < lattice->num_places; p++) {
            struct taken taken = taken_by(group, surrogate, &body, m, p);
            double *under = surrogate->under + (m * group->most_places + p) * num_kernels;
            for (int64_t i = 0; i < num_kernels; i++) under[i] = kernel_s(&body, &taken, i);
        }
    }
}

struct body_model {
    const struct ls_group *group;
    const struct ls_record *record;
    const struct ls_surrogate *surrogate;
    int64_t sm;
};

static double finish_log(const struct body_model *model, const struct body *body, int64_t run) {
    const struct ls_group *group = model->group;
    const int64_t *places = model->record->places + run * group->num_comms;
    struct progress now = {0, 1.0, 0.0};
    for (int64_t j = 0; j < group->num_comms && now.i < body->num_kernels; j++) {
        int64_t m = group->lattice_of[j], place = places[j];
        double comm_s = model->surrogate->comm_s[j * group->most_places + place];
        struct taken taken = taken_by(group, model->surrogate, body, m, place);
        while (now.i < body->num_kernels) {
            double whole_s = kernel_s(body, &taken, now.i), rest_s = now.left * whole_s;
            if (comm_s < rest_s) {
                now.left -= comm_s / whole_s;
                now.time_s += comm_s;
                break;
            }
            comm_s -= rest_s;
            now = (struct progress){now.i + 1, 1.0, now.time_s + rest_s};
        }
    }
    for (; now.i < body->num_kernels; now.i++, now.left = 1.0) now.time_s += now.left * solo_s(body, 0, now.i);
    return log(now.time_s);
}

static void predict_body(const void *context, const double *params, double *values, double *jacobian) {
    const struct body_model *model = context;
    int64_t num_runs = model->record->num_runs;
    struct body body = body_of(model->group, model->sm, params);
    for (int64_t d = 0; d < num_runs; d++) values[d] = finish_log(model, &body, d);
    for (int64_t a = 0; jacobian && a < NUM_BODY; a++) {
        double shifted[NUM_BODY];
        memcpy(shifted, params, sizeof shifted);
        shifted[a] += SHIFT;
        body = body_of(model->group, model->sm, shifted);
        for (int64_t d = 0; d < num_runs; d++) {
            jacobian[d * NUM_BODY + a] = (finish_log(model, &body, d) - values[d]) / SHIFT;
        }
    }
}

/* The constants of the computations for each SM count in question, under the collectives as `surrogate` has them. */
API int ls_fit_body(const struct ls_group *group, const struct ls_record *record, const struct ls_surrogate *surrogate,
                    const int64_t *sms, int64_t num_sms, const double *mean, const double *prior_sd, int64_t num_steps,
                    double *params, double *covariance, double *cost) {
    int64_t rows = record->num_runs;
    double *scratch = fit_scratch(rows, NUM_BODY), *observed = malloc((size_t)(2 * rows) * sizeof *observed);
    if (scratch && observed) {
        double *sd = observed + rows;
        for (int64_t d = 0; d < rows; d++) {
            observed[d] = log(record->comp_s[d]);
            sd[d] = sqrt(record->sigma * record->sigma / record->num[d] + group->body_sd * group->body_sd);
        }
        for (int64_t s = 0; s < num_sms; s++) {
            struct body_model model = {group, record, surrogate, sms[s]};
            struct problem problem = {rows, NUM_BODY, observed, sd, mean, prior_sd, &model, predict_body};
            fit(&problem, num_steps, params + s * NUM_BODY, covariance + s * NUM_BODY * NUM_BODY, cost + s, scratch);
        }
    }
    int status = scratch && observed ? 0 : -1;
    free(scratch);
    free(observed);
    return status;
}
