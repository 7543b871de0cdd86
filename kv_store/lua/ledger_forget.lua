-- End all reservations of one life of a worker. ARGV: worker id, incarnation. Returns {how many, ...}.
sweep()
local life = life_of(ARGV[3], ARGV[4])
return {life and close_all(ARGV[3], life) or 0, save()}
